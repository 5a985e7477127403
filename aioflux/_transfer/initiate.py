"""Beginning a multipart upload, and ending those that a lost answer began.

An upload whose id nobody heard is billed until somebody aborts it. It is found in the list of open
uploads: it has the key, it was begun while an attempt was under way whose answer was lost (or was
an error that a gateway may have sent after the work), and nobody in this process knows its id.
Where more are found than answers were lost, one of them is somebody else's, and all are left alone.
Where somebody else begins to write the same key in the very second in which an attempt is lost that
was not carried out, theirs is taken for it; that upload fails then with NotFoundError, as if this
one had replaced it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from aioflux._transfer.ambiguous_writes import Fate
from aioflux.errors import StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from aioflux._services.base import Service, WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import OpenUpload

__all__ = ["Initiation", "Window", "left_over"]

_log = logging.getLogger("aioflux")

_TICK = timedelta(seconds=1)
"""Services write the time of an upload in whole seconds; clocks may differ as much."""

_known: set[str] = set()
"""Ids of the uploads that writers of this process have under way."""

_locks: weakref.WeakKeyDictionary[Service, weakref.WeakValueDictionary[str, asyncio.Lock]] = (
    weakref.WeakKeyDictionary()
)
"""One upload of a key is begun at a time: an upload of the same store that is just being begun must
not be taken for one that was lost."""


class Window(NamedTuple):
    """The time of one attempt, in seconds of this machine's clock, from any beginning."""

    begin: float
    """When it was sent."""
    end: float
    """When its answer was heard, or known to be lost."""


def left_over(
    uploads: Iterable[OpenUpload],
    *,
    key: str,
    known: Collection[str],
    own_id: str,
    lost: Iterable[Window],
    heard: Window,
    now: datetime,
) -> list[str]:
    """Return the ids of uploads that were begun by attempts whose answers were lost.

    Args:
        uploads: The open uploads there are.
        key: Key of the upload.
        known: Ids that somebody in this process knows.
        own_id: Id that a later attempt got, whose time is read from the service's own clock; empty
            where none did.
        lost: Attempts whose answers were lost.
        heard: The attempt that got `own_id`; where none did, the moment that is `now`.
        now: Time of this machine, which counts where there is no `own_id`.
    """
    same = [upload for upload in uploads if upload.key == key]
    own = [upload.initiated for upload in same if upload.upload_id == own_id]
    then = own[0] if own else now
    # No attempt that was lost came after the one that was heard.
    latest = then if own else now + _TICK
    spans = [
        (
            then - timedelta(seconds=heard.end - begin) - _TICK,
            min(then - timedelta(seconds=heard.begin - end) + _TICK, latest),
        )
        for begin, end in lost
    ]
    return [
        upload.upload_id
        for upload in same
        if upload.upload_id not in known
        and any(since <= upload.initiated <= until for since, until in spans)
    ]


class Initiation:
    """The beginning of one upload.

    Attributes:
        upload_id: Its id, once it was heard.
    """

    def __init__(self, session: Session, request: WriteRequest) -> None:
        self.upload_id = ""
        self._session = session
        self._request = request
        self._key = request.key
        self._lost: list[Window] = []
        self._is_unanswered = False
        self._heard: Window | None = None

    async def begin(self) -> str:
        """Begin the upload and return its id; one that an attempt began unheard is ended."""
        session, key = self._session, self._key
        clock = asyncio.get_running_loop().time

        async def attempt(_: int) -> str:
            fate, begun = Fate(), clock()
            try:
                upload_id = await fate.hear(session.service.initiate_upload(self._request))
            except BaseException:
                if fate.is_open:
                    self._lost.append(Window(begun, clock()))
                self._is_unanswered = self._is_unanswered or fate.is_unanswered
                raise
            self._heard = Window(begun, clock())
            return upload_id

        async with self._lock():
            self.upload_id = await session.call(key, attempt)
            _known.add(self.upload_id)
            try:
                await self._end_unheard()
            except StorageError as exc:
                # The write itself goes on.
                _log.warning(
                    "an upload of %s may be left open, `Store.clean` ends it: %s",
                    session.service.uri(key),
                    exc,
                )
        return self.upload_id

    async def abort(self) -> None:
        """End the upload, whether its id was heard or not; again does no harm."""
        if self.upload_id:
            await self._abort(self.upload_id)
            self.forget()
        async with self._lock():
            await self._end_unheard()

    def forget(self) -> None:
        """Let go of the id: the upload is complete or aborted."""
        _known.discard(self.upload_id)

    def _lock(self) -> asyncio.Lock:
        locks = _locks.setdefault(self._session.service, weakref.WeakValueDictionary())
        return locks.setdefault(self._key, asyncio.Lock())

    async def _end_unheard(self) -> None:
        if not self._lost:
            return
        session, key = self._session, self._key

        async def attempt(_: int) -> Sequence[OpenUpload]:
            try:
                return await session.service.list_uploads(key)
            except TransientError as exc:
                if self.upload_id or self._is_unanswered:
                    raise
                # A service that was too busy for every attempt is asked once, not eight times more.
                raise StorageError(exc.message, uri=exc.uri, status=exc.status) from exc

        uploads = await session.call(key, attempt)
        at = asyncio.get_running_loop().time()
        own_is_open = any(upload.upload_id == self.upload_id for upload in uploads)
        found = left_over(
            uploads,
            key=key,
            known=_known,
            own_id=self.upload_id,
            lost=self._lost,
            heard=self._heard if self._heard and own_is_open else Window(at, at),
            now=datetime.now(UTC),
        )
        if len(found) > len(self._lost):
            _log.warning(
                "an upload of %s may be left open, `Store.clean` ends it: somebody else began to "
                "write the object in the same moment",
                session.service.uri(key),
            )
        else:
            for upload_id in found:
                await self._abort(upload_id)
        self._lost.clear()

    async def _abort(self, upload_id: str) -> None:
        session, key = self._session, self._key
        await session.call(key, lambda _: session.service.abort_upload(key, upload_id))
