"""Initiation of a multipart upload, and abort of uploads whose id was lost.

If the response to an initiation is lost, an upload with an unknown id may be open, and is billed
until it is aborted. Such an upload is found in the listing of open uploads: it has the same key,
was initiated at the time of an ambiguous attempt, and no writer of this process has its id. If more
uploads are found than there were ambiguous attempts, one of them belongs to another writer, and
none is aborted.

The upload of another writer is aborted by mistake if it was initiated in the same second as an
ambiguous attempt that the service did not carry out. The other writer then fails with
NotFoundError.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux._transfer.ambiguous_writes import AmbiguousWrite
from aioflux._transfer.lost_uploads import Window, lost_uploads
from aioflux.errors import StorageError, TransientError

if TYPE_CHECKING:
    from aioflux._services.base import Service, WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import OpenUpload

_log = logging.getLogger("aioflux")

_own_ids: set[str] = set()
"""Ids of all open uploads of this process."""

_locks: weakref.WeakKeyDictionary[Service, weakref.WeakValueDictionary[str, asyncio.Lock]] = (
    weakref.WeakKeyDictionary()
)
"""Locks by key: a store initiates one upload of a key at a time. A second upload whose id has not
arrived yet would look like an upload of an ambiguous attempt."""


class Initiation:
    """Initiation and abort of one upload.

    Attributes:
        upload_id: Id of the upload; empty until it is known.
    """

    def __init__(self, session: Session, request: WriteRequest) -> None:
        self.upload_id = ""
        self._session = session
        self._request = request
        self._key = request.key
        self._ambiguous: list[Window] = []
        self._needs_check = False
        self._succeeded: Window | None = None

    async def run(self) -> str:
        """Initiate the upload and return its id; abort the uploads of ambiguous attempts."""
        session, key = self._session, self._key
        clock = asyncio.get_running_loop().time

        async def attempt() -> str:
            ambiguous, started_at = AmbiguousWrite(), clock()
            try:
                upload_id = await ambiguous.run_attempt(
                    session.service.initiate_upload(self._request)
                )
            except BaseException:
                if ambiguous.maybe_done:
                    self._ambiguous.append(Window(started_at, clock()))
                self._needs_check = self._needs_check or ambiguous.needs_check
                raise
            self._succeeded = Window(started_at, clock())
            return upload_id

        async with self._lock():
            self.upload_id = await session.call(key, attempt)
            _own_ids.add(self.upload_id)
            try:
                await self._abort_lost()
            except StorageError as exc:
                # Not raised: the upload of this writer is open and can continue.
                _log.warning(
                    "an upload of %s may be left open; `Store.clean` aborts it: %s",
                    session.service.uri(key),
                    exc,
                )
        return self.upload_id

    async def abort(self) -> None:
        """Abort the upload, even if its id is not known. Idempotent."""
        if self.upload_id:
            await self._abort(self.upload_id)
            self.forget()
        async with self._lock():
            await self._abort_lost()

    def forget(self) -> None:
        """Forget the id, after the upload was completed or aborted."""
        _own_ids.discard(self.upload_id)

    def _lock(self) -> asyncio.Lock:
        locks = _locks.setdefault(self._session.service, weakref.WeakValueDictionary())
        return locks.setdefault(self._key, asyncio.Lock())

    async def _abort_lost(self) -> None:
        if not self._ambiguous:
            return
        session, key = self._session, self._key

        async def attempt() -> Sequence[OpenUpload]:
            try:
                return await session.service.list_uploads(key)
            except TransientError as exc:
                if self.upload_id or self._needs_check:
                    raise
                # All ambiguous attempts were throttled, so an open upload is unlikely: do not retry
                # this listing, because each request adds to the load of the service.
                raise StorageError(exc.message, uri=exc.uri, status=exc.status) from exc

        uploads = await session.call(key, attempt)
        now = asyncio.get_running_loop().time()
        own_is_open = any(upload.upload_id == self.upload_id for upload in uploads)
        lost = lost_uploads(
            uploads,
            key=key,
            known_ids=_own_ids,
            own_id=self.upload_id,
            ambiguous=self._ambiguous,
            succeeded=self._succeeded if self._succeeded and own_is_open else Window(now, now),
            now=datetime.now(UTC),
        )
        if len(lost) > len(self._ambiguous):
            _log.warning(
                "an upload of %s may be left open; `Store.clean` aborts it: another writer began "
                "to write the object at the same time",
                session.service.uri(key),
            )
        else:
            for upload_id in lost:
                await self._abort(upload_id)
        self._ambiguous.clear()

    async def _abort(self, upload_id: str) -> None:
        session, key = self._session, self._key
        await session.call(key, session.service.abort_upload, key, upload_id)
