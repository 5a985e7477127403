"""Writes of objects: one request if they are small, a multipart upload if they are large.

    caller's memory -> parts (memoryviews, or one buffer each if writes are small)
        -> crc32c of each -> service
        -> complete, which publishes the whole object -> its crc32c against the parts', combined

An error, a cancellation or an exception in the `async with` body aborts the upload: nothing is
published and nothing stays, except on `az://`: uncommitted blocks, which no request deletes alone,
stay until the next write of the key or `Store.clean`, or for a week.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._services.base import Precondition, Source, WriteRequest
from aioflux._transfer.ambiguous_writes import AmbiguousWrite, ResendLimit, find_written, send_write
from aioflux._transfer.conditions import require
from aioflux._transfer.delete import delete
from aioflux._transfer.initiate import Initiation
from aioflux._transfer.prefault import prefault
from aioflux._transfer.put import compare_stored, put_once
from aioflux._transfer.range_plan import plan_part_size
from aioflux._transfer.temp_keys import new_temporary_key
from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux.errors import AiofluxError, ChecksumError, NotFoundError, StorageError

if TYPE_CHECKING:
    from types import TracebackType

    from aioflux._services.base import UploadedPart
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["ObjectWriter", "put"]

_log = logging.getLogger("aioflux")

_INTERRUPTIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

_INITIATE_WAIT_SECONDS = 0.5
"""Time that an abort waits for the id of an upload that is being initiated, before it looks for the
upload in a listing."""


async def put(session: Session, request: WriteRequest, data: memoryview) -> ObjectMeta:
    """Write a whole object that is in memory: one request, or parts in parallel."""
    if data.nbytes > session.options.part_size_bytes:
        async with _WholeWriter(session, request) as writer:
            await writer.write(data)
        return writer.meta
    return await put_once(session, request, data)


class ObjectWriter:
    """A writer of one object, which is published whole when the `async with` body ends well.

    Holds at most `TransferOptions.max_buffered_bytes`; `write` waits while that much is being sent.
    Up to one part in all is one request, more is a multipart upload with parts in parallel.

    Parts double in size every 900 of them, since an upload has 10,000 at most, and a part must be
    held whole. As they grow, fewer are held; once one alone is more than `max_buffered_bytes`, one
    at a time is, that part is the bound, and a warning is logged. With the default sizes this
    begins at 98 GiB with parts of 128 MiB, and ends at 5 TiB with parts of 4 GiB. A larger
    `TransferOptions.part_size_bytes` needs fewer parts, which then grow later. Memory of the caller
    that is sent without a copy does not count.

    Attributes:
        meta: Metadata of the object, once it is published.
    """

    meta: ObjectMeta

    def __init__(self, session: Session, request: WriteRequest) -> None:
        self._session = session
        self._request = request
        # A multipart upload has no precondition
        # (cloud.google.com/storage/docs/multipart-uploads), so that a conditional one grows under
        # another key and becomes visible by a compose, which does.
        self._is_temporary = (
            bool(request.precondition) and not session.service.capabilities.conditional_complete
        )
        self._upload = (
            replace(request, key=new_temporary_key(), precondition=Precondition())
            if self._is_temporary
            else request
        )
        self._key = self._upload.key
        self._initiation = Initiation(session, self._upload)
        self._initiating: asyncio.Task[str] | None = None
        self._buffer = bytearray()
        self._capacity = 0
        # A part is held from its first byte in the buffer until it is stored.
        self._held = ByteBudget(session.options.max_buffered_bytes)
        self._parts: list[asyncio.Task[tuple[UploadedPart, int]]] = []
        self._offset = 0
        self._failure: BaseException | None = None
        self._completing = False
        self._closed = False
        self._ended_by: StorageError | None = None
        self._warned = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            await self.abort(error)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._offset + len(self._buffer)

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write the bytes of `data` and return how many they are.

        The memory may be reused when this returns. Memory of many parts is sent without a copy.

        Raises:
            StorageError: A part that was sent before could not be stored.
            ValueError: The writer is closed.
        """
        if self._closed:
            raise self._ended_by or self._closed_error()
        self._session.require_own_process(self._request.key)
        self._raise_failure()
        view = memoryview(data).cast("B")
        size = view.nbytes
        try:
            await self._add(view)
        except BaseException as exc:
            self._failure = self._failure or exc
            self._raise_ended(exc)
            raise
        return size

    async def write_copy(self, data: bytes | bytearray | memoryview) -> int:
        """Write as `write`; a zero-copy writer copies this data alone."""
        return await self.write(data)

    async def aclose(self) -> None:
        """Send the rest and publish the object. Closing twice does nothing.

        Raises:
            StorageError: Something of it could not be stored; nothing was published, unless the
                message says that this is unknown.
        """
        if self._closed:
            if self._ended_by is not None:
                raise self._ended_by
            return
        try:
            self._session.require_own_process(self._request.key)
            self._raise_failure()
            await self._flush()
            if self._initiating is None:
                self.meta = await put_once(self._session, self._request, memoryview(self._buffer))
            else:
                self.meta = await self._complete()
        except BaseException as exc:
            await self.abort(exc)
            self._raise_ended(exc)
            raise
        self._closed = True
        self._session.open_transfers.discard(self)
        self._initiation.forget()
        if self._is_temporary and self._completing:
            await self._remove_temporary()

    async def end(self) -> None:
        """Abort because the store is closed: the next write raises that."""
        what = "it may be there, whole" if self._completing else "nothing of it is there"
        self._ended_by = StorageError(
            f"could not write {self._uri}: its store was closed meanwhile; {what}", uri=self._uri
        )
        await self.abort(self._ended_by)
        for note in getattr(self._ended_by, "__notes__", ()):
            _log.warning("a writer was open when its store was closed: %s", note)

    async def abort(self, reason: BaseException | None = None) -> None:
        """Drop what was written; a failure to clean up is noted on `reason`.

        It is run to completion, also if the caller is cancelled meanwhile; `CleanupTimeouts` says
        how long it may take, and how long a caller that was cancelled or interrupted waits.
        """
        if self._closed:
            return
        self._closed = True
        self._session.open_transfers.discard(self)
        self._buffer = bytearray()
        if self._initiating is None or self._session.is_inherited:
            return
        is_interrupted = isinstance(reason, _INTERRUPTIONS)
        try:
            seconds = self._session.cleanup_timeouts.abort_wait_seconds
            await self._session.clean_up(
                self._clean_up, wait_seconds=seconds if is_interrupted else None
            )
        except (AiofluxError, TimeoutError) as exc:
            note = (
                f"the upload of {self._uri} could not be aborted, `Store.clean` ends it: "
                f"{str(exc) or 'the service does not answer'}"
            )
            if reason is None:
                exc.add_note(note)
                raise
            reason.add_note(note)

    @property
    def _uri(self) -> str:
        return self._session.service.uri(self._request.key)

    def _closed_error(self) -> ValueError:
        return ValueError(f"{self._uri} is written through a closed writer")

    def _part_size(self) -> int:
        planned = plan_part_size(len(self._parts) + 1, self._session.options.part_size_bytes)
        return min(planned, self._session.service.capabilities.max_part_size_bytes)

    async def _clean_up(self) -> None:
        """Abort the upload. It may be cut short and run again."""
        for task in self._parts:
            task.cancel()
        if self._initiating is not None and not self._initiating.done():
            await asyncio.wait([self._initiating], timeout=_INITIATE_WAIT_SECONDS)
            self._initiating.cancel()
        tasks = [*self._parts, *([self._initiating] if self._initiating else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._initiation.abort()
        if self._is_temporary and self._completing:
            await self._delete_temporary()

    async def _begin(self) -> None:
        if self._initiating is None:
            request = self._request
            # Here and not at completion, which would reject the object after all of it was sent.
            await require(self._session, request.key, request.precondition)
            if self._closed:
                raise self._ended_by or self._closed_error()
            self._session.open_transfers.add(self)
            # A task of its own: cancelled before the response arrives, the upload would stay open.
            self._initiating = self._session.start_cleanup(self._initiation.begin())
        await asyncio.shield(self._initiating)
        if self._closed:
            # Aborted meanwhile: a part that starts now would not be cancelled.
            raise self._ended_by or self._closed_error()

    async def _add(self, view: memoryview) -> None:
        if not self._buffer and view.nbytes >= 2 * self._session.options.max_buffered_bytes:
            view = await self._write_from_caller(view, is_rest=False)
        while view.nbytes:
            # A full buffer waits for the next byte: what fits one part needs no multipart upload.
            if len(self._buffer) == self._capacity:
                if self._buffer:
                    await self._send_buffer()
                await self._open_buffer()
            free = self._capacity - len(self._buffer)
            self._buffer += view[:free]
            view = view[free:]

    async def _open_buffer(self) -> None:
        """Wait for memory for one more part."""
        size = self._part_size()
        most = self._session.options.max_buffered_bytes
        if size > most and not self._warned:
            self._warned = True
            _log.warning(
                "%s has %d parts, and its next ones are of %d bytes, more than max_buffered_bytes "
                "(%d): one at a time is held from here on; a larger part_size_bytes needs fewer",
                self._uri,
                len(self._parts),
                size,
                most,
            )
        await self._held.acquire(size)
        self._capacity = size
        self._raise_failure()

    async def _send_buffer(self) -> None:
        """Send the buffer as one part, in the background."""
        await self._begin()
        capacity, self._capacity = self._capacity, 0
        part, self._buffer = self._buffer, bytearray()
        task = self._start(memoryview(part))
        task.add_done_callback(lambda task: self._done(task, self._held, capacity))

    def _done(
        self, task: asyncio.Task[tuple[UploadedPart, int]], budget: ByteBudget, size: int
    ) -> None:
        budget.release(size)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    async def _flush(self) -> None:
        """Send the last part of an upload; without an upload the buffer becomes one request."""
        if self._initiating is not None and self._buffer:
            await self._send_buffer()

    async def _write_from_caller(self, view: memoryview, *, is_rest: bool) -> memoryview:
        """Send parts from the caller's memory, wait for them, and return the rest of it.

        Args:
            view: The memory.
            is_rest: It ends the object, so that the last part goes with the others.
        """
        await self._begin()
        started: list[asyncio.Task[tuple[UploadedPart, int]]] = []
        while view.nbytes > (0 if is_rest else self._part_size()):
            size = self._part_size()
            started.append(self._start(view[:size]))
            view = view[size:]
        try:
            await asyncio.wait(started, return_when=asyncio.FIRST_EXCEPTION)
            for task in started:
                if task.done():
                    task.result()
        except BaseException:
            # The memory is the caller's again when this returns.
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
            raise
        return view

    def _start(self, *views: memoryview) -> asyncio.Task[tuple[UploadedPart, int]]:
        task = asyncio.create_task(self._send_part(len(self._parts) + 1, views, self._offset))
        self._offset += sum(view.nbytes for view in views)
        self._parts.append(task)
        return task

    def _raise_ended(self, error: BaseException) -> None:
        """Raise what ended the writer, if its tasks were cancelled and not the caller's."""
        task = asyncio.current_task()
        if self._ended_by is None or (task is not None and task.cancelling()):
            return
        if isinstance(error, asyncio.CancelledError | StorageError):
            raise self._ended_by from None

    def _raise_failure(self) -> None:
        if isinstance(self._failure, asyncio.CancelledError):
            raise StorageError(
                f"could not write {self._uri}: an earlier write was cancelled and only a part of "
                "its bytes was taken; begin again",
                uri=self._uri,
            )
        if self._failure is not None:
            raise self._failure

    async def _send_part(
        self, number: int, views: tuple[memoryview, ...], offset: int
    ) -> tuple[UploadedPart, int]:
        session = self._session
        resends = ResendLimit()
        checksum: int | None = None

        async def attempt(_: int) -> UploadedPart:
            # Here and not before: parts of a large object wait for slots, and the checksums of all
            # at once would block the loop.
            nonlocal checksum
            if checksum is None:
                checksum = 0
                for view in views:
                    prefault(view)
                    checksum = crc32c(view, checksum)
            sent = checksum if session.options.verify else None
            try:
                part = await session.service.put_part(
                    self._key,
                    self._initiation.upload_id,
                    number,
                    views,
                    offset=offset,
                    crc32c=sent,
                )
            except ChecksumError as exc:
                raise resends.next_error(exc) from exc
            if sent is not None and part.crc32c not in {None, sent}:
                raise resends.next_error(
                    ChecksumError(
                        f"could not write part {number} of {self._uri}: the service holds other "
                        "bytes than were sent",
                        uri=self._uri,
                    )
                )
            return part

        num_bytes = sum(view.nbytes for view in views)
        part = await session.call(self._key, attempt, num_bytes=num_bytes)
        assert checksum is not None
        return part, checksum

    async def _complete(self) -> ObjectMeta:
        stored = await asyncio.gather(*self._parts)
        checksum = 0
        for part, part_checksum in stored:
            checksum = combine_crc32c(checksum, part_checksum, part.size)
        self._completing = True
        meta = await self._complete_upload([part for part, _ in stored], checksum)
        await compare_stored(self._session, meta, checksum)
        return await self._publish(meta) if self._is_temporary else meta

    async def _complete_upload(self, parts: list[UploadedPart], checksum: int) -> ObjectMeta:
        session, upload_id = self._session, self._initiation.upload_id
        size = sum(part.size for part in parts)
        ambiguous = AmbiguousWrite()

        async def find() -> ObjectMeta | None:
            written = WriteRequest(self._key)
            meta = await find_written(session, written, size=size, crc32c=checksum)
            if meta is not None:
                # Gone with the completion, unless the object existed before with these bytes.
                await self._initiation.abort()
            return meta

        try:
            return await send_write(
                session,
                self._upload,
                lambda: session.service.complete_upload(self._upload, upload_id, parts),
                find,
                ambiguous=ambiguous,
                find_if_throttled=True,
            )
        except NotFoundError as exc:
            # An upload is gone once it is complete.
            if ambiguous.maybe_done:
                raise self._unknown_error() from exc
            raise

    async def _publish(self, temporary: ObjectMeta) -> ObjectMeta:
        """Publish the temporary object by a compose of one source, which takes a precondition."""
        session, request = self._session, self._request
        source = Source(key=temporary.key, generation=temporary.generation)
        return await send_write(
            session,
            request,
            lambda: session.service.compose(request, [source]),
            lambda: find_written(session, request, size=temporary.size, crc32c=temporary.crc32c),
            find_if_throttled=True,
        )

    async def _delete_temporary(self) -> None:
        with suppress(NotFoundError):
            await delete(self._session, self._key)

    async def _remove_temporary(self) -> None:
        """Delete the temporary object; a failure is logged, as the object itself is written."""
        try:
            await self._session.clean_up(self._delete_temporary)
        except (AiofluxError, TimeoutError) as exc:
            _log.warning(
                "%s was written, but its temporary object %s is still there, `Store.clean` removes "
                "it: %s",
                self._uri,
                self._session.service.uri(self._key),
                exc,
            )

    def _unknown_error(self) -> StorageError:
        return StorageError(
            f"it is not known whether {self._uri} was written: the response to the completion of "
            "its upload was lost, the upload is gone, and the object is not what was sent; it was "
            "written and then replaced, or never written; check it before you write it again",
            uri=self._uri,
        )


class _WholeWriter(ObjectWriter):
    """A writer of an object whose bytes all come in one `write`.

    All of its parts are sent from the caller's memory. Other writers copy the last one, which took
    16 MiB and one part's time more for 1 GiB.
    """

    async def _add(self, view: memoryview) -> None:
        await self._write_from_caller(view, is_rest=True)
