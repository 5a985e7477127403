"""Initiation of a multipart upload, and abort of uploads whose id was lost.

An upload whose id never arrived is billed until it is aborted. It is found in the listing of open
uploads: it has the key, it was initiated during an ambiguous attempt, and no writer of this process
has its id. If more are found than attempts were ambiguous, one of them belongs to another writer,
and none is aborted. If another writer initiates an upload of the key in the second of an ambiguous
attempt that was not carried out, theirs is aborted; it fails then with NotFoundError, as if this
one had replaced it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux._transfer.ambiguous_writes import AmbiguousWrite
from aioflux._transfer.lost_uploads import Window, lost_uploads
from aioflux.errors import StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._services.base import Service, WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import OpenUpload

__all__ = ["Initiation"]

_log = logging.getLogger("aioflux")

_own_ids: set[str] = set()
"""Ids of the open uploads of this process."""

_locks: weakref.WeakKeyDictionary[Service, weakref.WeakValueDictionary[str, asyncio.Lock]] = (
    weakref.WeakKeyDictionary()
)
"""One upload of a key is initiated at a time: another one of the same store that is being initiated
must not be taken for a lost one."""


class Initiation:
    """Initiation of one upload.

    Attributes:
        upload_id: Its id, once it is known.
    """

    def __init__(self, session: Session, request: WriteRequest) -> None:
        self.upload_id = ""
        self._session = session
        self._request = request
        self._key = request.key
        self._lost: list[Window] = []
        self._needs_check = False
        self._heard: Window | None = None

    async def begin(self) -> str:
        """Initiate the upload and return its id; abort those of ambiguous attempts."""
        session, key = self._session, self._key
        clock = asyncio.get_running_loop().time

        async def attempt(_: int) -> str:
            ambiguous, started_at = AmbiguousWrite(), clock()
            try:
                upload_id = await ambiguous.watch(session.service.initiate_upload(self._request))
            except BaseException:
                if ambiguous.maybe_done:
                    self._lost.append(Window(started_at, clock()))
                self._needs_check = self._needs_check or ambiguous.needs_check
                raise
            self._heard = Window(started_at, clock())
            return upload_id

        async with self._lock():
            self.upload_id = await session.call(key, attempt)
            _own_ids.add(self.upload_id)
            try:
                await self._abort_lost()
            except StorageError as exc:
                # The upload itself is not affected.
                _log.warning(
                    "an upload of %s may be left open, `Store.clean` ends it: %s",
                    session.service.uri(key),
                    exc,
                )
        return self.upload_id

    async def abort(self) -> None:
        """Abort the upload, also if its id is not known; idempotent."""
        if self.upload_id:
            await self._abort(self.upload_id)
            self.forget()
        async with self._lock():
            await self._abort_lost()

    def forget(self) -> None:
        """Forget the id: the upload is complete or aborted."""
        _own_ids.discard(self.upload_id)

    def _lock(self) -> asyncio.Lock:
        locks = _locks.setdefault(self._session.service, weakref.WeakValueDictionary())
        return locks.setdefault(self._key, asyncio.Lock())

    async def _abort_lost(self) -> None:
        if not self._lost:
            return
        session, key = self._session, self._key

        async def attempt(_: int) -> Sequence[OpenUpload]:
            try:
                return await session.service.list_uploads(key)
            except TransientError as exc:
                if self.upload_id or self._needs_check:
                    raise
                # A service that throttled every attempt gets one request, not eight more.
                raise StorageError(exc.message, uri=exc.uri, status=exc.status) from exc

        uploads = await session.call(key, attempt)
        at = asyncio.get_running_loop().time()
        own_is_open = any(upload.upload_id == self.upload_id for upload in uploads)
        found = lost_uploads(
            uploads,
            key=key,
            known=_own_ids,
            own_id=self.upload_id,
            lost=self._lost,
            heard=self._heard if self._heard and own_is_open else Window(at, at),
            now=datetime.now(UTC),
        )
        if len(found) > len(self._lost):
            _log.warning(
                "an upload of %s may be left open, `Store.clean` ends it: another writer began "
                "to write the object in the same moment",
                session.service.uri(key),
            )
        else:
            for upload_id in found:
                await self._abort(upload_id)
        self._lost.clear()

    async def _abort(self, upload_id: str) -> None:
        session, key = self._session, self._key
        await session.call(key, lambda _: session.service.abort_upload(key, upload_id))
