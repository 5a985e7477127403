"""Writes of objects: one request if they are small, a multipart upload if they are large.

    caller's memory -> parts (memoryviews, or one buffer each if writes are small)
        -> crc32c of each -> service
        -> complete, which publishes the whole object -> compare crc32c: object, combined parts

An error, a cancellation or an exception in the `async with` body aborts the upload: the parts are
deleted, and nothing is published unless the completion was already sent. On `az://` the next write
of the key or `Store.clean` deletes the parts, or the service after a week.

If the response to the start of an upload is lost, an upload without parts may stay open. It is not
billed, and `Store.clean` aborts it.

Over 500 lines: the writers share how a part is gathered and sent, and how an upload ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._services.base import PartRequest, Precondition, Source, WriteRequest
from aioflux._transfer.ambiguous_writes import AmbiguousWrite, ResendLimit, find_written
from aioflux._transfer.arguments import parse_data
from aioflux._transfer.conditions import require
from aioflux._transfer.delete import delete, delete_if_damaged
from aioflux._transfer.prefault import prefault
from aioflux._transfer.read_plan import plan_part_size
from aioflux._transfer.temp_keys import new_temporary_key
from aioflux._values.checksums import combine_crc32c, crc32c_of_pieces
from aioflux.errors import (
    AiofluxError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from aioflux._services.base import Service, UploadedPart
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

_log = logging.getLogger("aioflux")

_INTERRUPTIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

_INITIATE_WAIT_SECONDS = 0.5
"""Time that an abort waits for the id of an upload that is being initiated."""


def put(
    session: Session, request: WriteRequest, data: memoryview
) -> Coroutine[Any, Any, ObjectMeta]:
    """Write a whole object from memory, by one request or in parallel parts."""
    if data.nbytes > session.options.part_size_bytes:
        return _put_parts(session, request, data)
    return put_once(session, request, [data])


async def _put_parts(session: Session, request: WriteRequest, data: memoryview) -> ObjectMeta:
    async with _WholeWriter(session, request) as writer:
        await writer.write(data)
    return writer.meta


async def put_once(
    session: Session, request: WriteRequest, pieces: Sequence[memoryview]
) -> ObjectMeta:
    """Write a whole object in one request. A body that arrives damaged is resent up to twice."""
    if request.precondition:
        await require(session, request.key, request.precondition)
    checksum = crc32c_of_pieces(pieces) if session.options.verify else None
    size = sum(map(len, pieces))
    write = AmbiguousWrite(
        session,
        request,
        lambda: session.service.put(request, pieces, crc32c=checksum),
        lambda: find_written(session, request, size=size, crc32c=crc32c_of_pieces(pieces)),
    )
    meta = await write.run(num_bytes=size)
    if checksum is not None and meta.crc32c != checksum:
        await delete_if_damaged(session, meta, checksum)
    return meta


class ObjectWriter:
    """A writer of one object, which is published whole when the `async with` body succeeds.

    Buffers at most `TransferOptions.max_buffered_bytes`; `write` waits while the buffer is full.
    An object of at most one part is sent by one request, a larger one by a multipart upload with
    parallel parts.

    The part size doubles every 900 parts, because an upload has at most 10,000 parts. A part is
    buffered as a whole. When one part is larger than `max_buffered_bytes`, one part at a time is
    buffered and sent, and a warning is logged. With the default sizes this begins at 98 GiB with
    parts of 128 MiB; at 5 TiB the parts have 4 GiB. With a larger `TransferOptions.part_size_bytes`
    the parts grow later. Memory of the caller that is sent without a copy does not count as
    buffered.

    Attributes:
        meta: Metadata of the object, set after it was published.
    """

    meta: ObjectMeta
    _is_buffered = True

    def __init__(self, session: Session, request: WriteRequest) -> None:
        self._session = session
        self._request = request
        # If the service accepts no precondition for the completion of an upload
        # (cloud.google.com/storage/docs/multipart-uploads), upload to a temporary key, and publish
        # by a compose, for which it accepts a precondition.
        self._is_temporary = (
            bool(request.precondition) and not session.service.capabilities.conditional_complete
        )
        self._upload = (
            replace(request, key=new_temporary_key(), precondition=Precondition())
            if self._is_temporary
            else request
        )
        self._key = self._upload.key
        self._initiating: asyncio.Task[None] | None = None
        self._upload_id = ""
        """Id of the upload; empty until it is known."""
        self._buffer = bytearray()
        self._num_unsent = 0
        """Number of bytes of the next part, which was not sent yet."""
        # The budget for a part is held from before its first byte is buffered until it is stored.
        self._budget = ByteBudget(session.options.max_buffered_bytes)
        self._num_held = 0
        """Bytes of the budget that are held for the next part."""
        self._parts: list[asyncio.Task[tuple[UploadedPart, int]]] = []
        self._part_size = self._plan_part()
        """Size of the next part."""
        self._min_direct_bytes = 2 * session.options.max_buffered_bytes
        self._offset = 0
        self._failure: BaseException | None = None
        self._completing = False
        self._may_be_open = False
        """A lost completion was found to be done; or the object had the same bytes before."""
        self._generation = ""
        """Generation of the temporary object; empty if it is unknown."""
        self._closed = False
        self._store_closed: StorageError | None = None
        self._warned = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.aclose()
        else:
            await self.abort(error)

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._offset + self._num_unsent

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write the bytes of `data`, and return their number.

        The memory may be reused when this returns. If nothing is buffered, data of twice
        `TransferOptions.max_buffered_bytes` or more is sent without a copy.

        Raises:
            StorageError: This or an earlier part could not be stored, or the store was closed.
            ValueError: The writer is closed.
        """
        if self._closed:
            raise self._store_closed or self._closed_error()
        self._session.require_own_process(self._request.key)
        self._raise_failure()
        view = parse_data(self._request.key, data)
        size = view.nbytes
        try:
            await self._add(view)
        except BaseException as exc:
            self._failure = self._failure or exc
            self._raise_if_store_closed(exc)
            raise
        return size

    async def write_copy(self, data: bytes | bytearray | memoryview) -> int:
        """Write as `write`, and in a `ZeroCopyWriter` copy the data, which its `write` does not."""
        return await self.write(data)

    async def aclose(self) -> None:
        """Send the remaining bytes and publish the object. A second call has no effect.

        Raises:
            StorageError: The object was not published, unless the message or a note says that it
                may exist.
        """
        if self._closed:
            if self._store_closed is not None:
                raise self._store_closed
            return
        try:
            self._session.require_own_process(self._request.key)
            self._raise_failure()
            unsent = await self._flush()
            if self._initiating is None:
                self.meta = await put_once(self._session, self._request, unsent)
            else:
                self.meta = await self._complete()
        except BaseException as exc:
            await self.abort(exc)
            self._raise_if_store_closed(exc)
            raise
        self._closed = True
        self._session.open_transfers.discard(self)
        if self._may_be_open:
            await self._clean_up_written(self._abort_upload, f"upload {self._upload_id}")
        if self._is_temporary and self._completing:
            temporary = self._session.service.uri(self._key)
            await self._clean_up_written(self._delete_temporary, f"temporary object {temporary}")

    async def on_store_close(self) -> None:
        """Abort the upload because the store is closed; the next write or close raises."""
        state = "it may have been published" if self._completing else "it was not published"
        self._store_closed = StorageError(
            f"could not write {self._uri}: its store was closed meanwhile; {state}", uri=self._uri
        )
        await self.abort(self._store_closed)
        for note in getattr(self._store_closed, "__notes__", ()):
            _log.warning("a writer was open when its store was closed: %s", note)

    async def abort(self, reason: BaseException | None = None) -> None:
        """Drop the written bytes and abort the upload.

        The abort is run to completion, even if the caller is cancelled meanwhile. `CleanupTimeouts`
        limits its time, and the time that a cancelled or interrupted caller waits for it.

        Args:
            reason: Error that is the cause, if any. A failure of the abort is added to it as a
                note. If there is no `reason`, the failure is raised.
        """
        if self._closed:
            return
        self._closed = True
        self._session.open_transfers.discard(self)
        self._take_unsent()
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
                f"the upload of {self._uri} could not be aborted; `Store.clean` aborts it: "
                f"{str(exc) or 'no response from the service'}"
            )
            if reason is None:
                exc.add_note(note)
                raise
            reason.add_note(note)

    @property
    def _uri(self) -> str:
        return self._session.service.uri(self._request.key)

    def _closed_error(self) -> ValueError:
        return ValueError(f"cannot write {self._uri}: the writer is closed; open a new writer")

    def _plan_part(self) -> int:
        planned = plan_part_size(len(self._parts) + 1, self._session.options.part_size_bytes)
        return min(planned, self._session.service.capabilities.max_part_size_bytes)

    async def _clean_up(self) -> None:
        """Abort the upload. May be cancelled and called again."""
        for task in self._parts:
            task.cancel()
        if self._initiating is not None and not self._initiating.done():
            await asyncio.wait([self._initiating], timeout=_INITIATE_WAIT_SECONDS)
            self._initiating.cancel()
        tasks = [*self._parts, *([self._initiating] if self._initiating else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._abort_upload()
        if self._is_temporary and self._completing:
            await self._delete_temporary()

    async def _abort_upload(self) -> None:
        if self._upload_id:
            session, key = self._session, self._key
            await session.call(key, session.service.abort_upload, key, self._upload_id)

    async def _initiate(self) -> None:
        initiate = self._session.service.initiate_upload
        self._upload_id = await self._session.call(self._key, initiate, self._upload)

    async def _start_upload(self) -> None:
        if self._initiating is None:
            request = self._request
            # Check before the first part, so that an unsupported precondition raises at once.
            if request.precondition:
                await require(self._session, request.key, request.precondition)
            if self._closed:
                raise self._store_closed or self._closed_error()
            self._session.open_transfers.add(self)
            # This is a separate task, because an initiation that is cancelled before its response
            # could leave an open upload.
            self._initiating = self._session.start_cleanup(self._initiate())
        await asyncio.shield(self._initiating)
        if self._closed:
            # Aborted meanwhile: the abort would not cancel a part that is sent from now on.
            raise self._store_closed or self._closed_error()

    async def _add(self, view: memoryview) -> None:
        """Add memory to the next part, and send each part that is full."""
        if self._is_buffered and not self._num_unsent and view.nbytes >= self._min_direct_bytes:
            view = await self._write_from_caller(view, is_rest=False)
        while view.nbytes:
            # A full part is sent only when another byte is written, because an object of one part
            # needs no multipart upload.
            if self._num_unsent == self._part_size:
                await self._send_unsent()
            if not self._num_unsent:
                await self._open_part()
            free = self._part_size - self._num_unsent
            self._add_unsent(view[:free])
            self._num_unsent += min(free, view.nbytes)
            view = view[free:]

    def _add_unsent(self, view: memoryview) -> None:
        self._buffer += view

    def _take_unsent(self) -> Sequence[memoryview]:
        """Return the bytes that were not sent yet, and release their memory."""
        buffer, self._buffer = self._buffer, bytearray()
        return [memoryview(buffer)]

    async def _open_part(self) -> None:
        """Wait for memory for one more part."""
        size, max_bytes = self._part_size, self._session.options.max_buffered_bytes
        if size > max_bytes and not self._warned:
            self._warned = True
            text = (
                "%s has %d parts, and its next parts have %d bytes, more than max_buffered_bytes "
                "(%d): from now on one part at a time is sent; set a larger part_size_bytes"
            )
            _log.warning(text, self._uri, len(self._parts), size, max_bytes)
        await self._hold(size)

    async def _hold(self, size: int) -> None:
        await self._budget.acquire(size)
        self._num_held = size
        self._raise_failure()

    async def _send_unsent(self) -> None:
        """Send the next part, in the background."""
        await self._start_upload()
        size, self._num_held = self._num_held, 0
        task = self._start_part(*self._take_unsent())
        self._num_unsent = 0
        task.add_done_callback(lambda task: self._on_part_done(task, size))

    def _on_part_done(self, task: asyncio.Task[tuple[UploadedPart, int]], size: int) -> None:
        self._budget.release(size)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    async def _flush(self) -> Sequence[memoryview]:
        """Send the last part of an upload; without an upload, return the whole object."""
        if self._initiating is None:
            return self._take_unsent()
        if self._num_unsent:
            await self._send_unsent()
        return ()

    async def _write_from_caller(self, view: memoryview, *, is_rest: bool) -> memoryview:
        """Send parts from the caller's memory, and return the rest, which fits in one part.

        Args:
            view: The memory.
            is_rest: The object ends with `view`, so the rest is sent as the last part, too.
        """
        await self._start_upload()
        started: list[asyncio.Task[tuple[UploadedPart, int]]] = []
        while view.nbytes > (0 if is_rest else self._part_size):
            size = self._part_size
            started.append(self._start_part(view[:size]))
            view = view[size:]
        try:
            await asyncio.wait(started, return_when=asyncio.FIRST_EXCEPTION)
            for task in started:
                if task.done():
                    task.result()
        except BaseException:
            # Wait for the parts, because the caller may reuse the memory when this returns.
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
            raise
        return view

    def _start_part(self, *views: memoryview) -> asyncio.Task[tuple[UploadedPart, int]]:
        task = asyncio.create_task(self._send_part(len(self._parts) + 1, views, self._offset))
        self._offset += sum(map(len, views))
        self._parts.append(task)
        self._part_size = self._plan_part()
        return task

    def _raise_if_store_closed(self, error: BaseException) -> None:
        """Raise the error of the closed store, if closing the store caused `error`.

        If the caller is being cancelled, return.
        """
        task = asyncio.current_task()
        if self._store_closed is None or (task is not None and task.cancelling()):
            return
        if isinstance(error, asyncio.CancelledError | StorageError):
            raise self._store_closed from None

    def _raise_failure(self) -> None:
        if isinstance(self._failure, asyncio.CancelledError):
            raise StorageError(
                f"could not write {self._uri}: an earlier write was cancelled, and only some of "
                "its bytes were written; open a new writer",
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

        async def send(service: Service) -> UploadedPart:
            # The checksum is computed when the part has a slot: the checksums of many parts at once
            # would block the event loop.
            nonlocal checksum
            for view in views:
                prefault(view)
            if checksum is None and session.options.verify:
                checksum = crc32c_of_pieces(views)
            request = PartRequest(self._key, self._upload_id, number, views, offset, checksum)
            try:
                part = await service.put_part(request)
            except ChecksumError as exc:
                resends.raise_transient(exc)
                raise
            if checksum is not None and part.crc32c not in {None, checksum}:
                text = "the stored bytes differ from the sent bytes"
                uri = self._uri
                error = ChecksumError(f"could not write part {number} of {uri}: {text}", uri=uri)
                resends.raise_transient(error)
                raise error
            return part

        num_bytes = sum(map(len, views))
        run = session.spread.run
        part = await session.call(self._key, run, num_bytes, send, num_bytes=num_bytes)
        if checksum is None:
            checksum = crc32c_of_pieces(views) if part.crc32c is None else part.crc32c
        return part, checksum

    async def _complete(self) -> ObjectMeta:
        stored = await asyncio.gather(*self._parts)
        checksum = 0
        for part, part_checksum in stored:
            checksum = combine_crc32c(checksum, part_checksum, part.size)
        self._completing = True
        meta = await self._complete_upload([part for part, _ in stored], checksum)
        self._generation = meta.generation
        await delete_if_damaged(self._session, meta, checksum)
        return await self._publish(meta) if self._is_temporary else meta

    async def _complete_upload(self, parts: list[UploadedPart], checksum: int) -> ObjectMeta:
        session, upload_id = self._session, self._upload_id
        size = sum(part.size for part in parts)

        async def find() -> ObjectMeta | None:
            written = WriteRequest(self._key)
            meta = await find_written(session, written, size=size, crc32c=checksum)
            self._may_be_open = meta is not None
            return meta

        def send() -> Awaitable[ObjectMeta]:
            return session.service.complete_upload(self._upload, upload_id, parts)

        try:
            return await AmbiguousWrite(session, self._upload, send, find).run(deletes_sources=True)
        except NotFoundError as exc:
            # An upload no longer exists after its completion.
            if exc.maybe_done:
                raise StorageError(
                    f"it is not known whether {self._uri} was written: the response to the "
                    "completion of its upload was lost, the upload no longer exists, and the "
                    "object differs from the sent bytes; it was written and then replaced, or "
                    "never written; check it before you write it again",
                    uri=self._uri,
                    maybe_done=True,
                ) from exc
            raise

    async def _publish(self, temporary: ObjectMeta) -> ObjectMeta:
        """Publish the temporary object under the requested key, by a conditional compose."""
        session, request = self._session, self._request
        source = Source(key=temporary.key, generation=temporary.generation)
        write = AmbiguousWrite(
            session,
            request,
            lambda: session.service.compose(request, [source]),
            lambda: find_written(session, request, size=temporary.size, crc32c=temporary.crc32c),
        )
        return await write.run(deletes_sources=True)

    async def _delete_temporary(self) -> None:
        with suppress(NotFoundError, PreconditionFailedError):
            await delete(self._session, self._key, generation=self._generation)

    async def _clean_up_written(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        """Clean up after the object was written; so a failure is only logged."""
        try:
            await self._session.clean_up(work)
        except (AiofluxError, TimeoutError) as exc:
            text = "%s was written, but its %s may still exist; `Store.clean` removes it: %s"
            _log.warning(text, self._uri, what, exc)


class _WholeWriter(ObjectWriter):
    """A writer of an object that is written by a single `write`.

    All parts are sent from the caller's memory. An `ObjectWriter` copies the last part and sends it
    after the others: 1 GiB needed 16 MiB more memory, and took the time of one part longer.
    """

    async def _add(self, view: memoryview) -> None:
        await self._write_from_caller(view, is_rest=True)


class ZeroCopyWriter(ObjectWriter):
    """A writer of memory that must not change until the writer is closed.

        header, tensor, header, tensor, ... -> parts of several memoryviews each -> service

    `write` returns before its bytes are sent. It waits while the upload is initiated, and while
    more than `max_in_flight_bytes` would be in parts that are not stored yet. So it is for memory
    such as the staged tensors of a checkpoint. After `abort` the caller may change the memory.
    """

    _is_buffered = False

    def __init__(self, session: Session, request: WriteRequest) -> None:
        super().__init__(session, request)
        self._pieces: list[memoryview] = []
        self._copied_size = 0
        options = session.options
        self._budget = ByteBudget(options.max_in_flight_bytes)
        # The copies in the current part are not counted, so one part is subtracted.
        self._copies_budget = ByteBudget(
            max(1, options.max_buffered_bytes - options.part_size_bytes)
        )

    async def write_copy(self, data: bytes | bytearray | memoryview) -> int:
        """Write a copy of the bytes of `data`, whose memory may be reused when this returns.

        Waits while more than `max_buffered_bytes` of copies are being sent or queued.
        """
        view = parse_data(self._request.key, data)
        size = view.nbytes
        while view.nbytes:
            # A copy belongs to one part only, so that its memory is freed after that part is sent.
            free = (self._part_size - self._num_unsent) or self._part_size
            piece = bytes(view[:free])
            await self.write(piece)
            self._copied_size += len(piece)
            view = view[free:]
        return size

    def _add_unsent(self, view: memoryview) -> None:
        self._pieces.append(view)

    def _take_unsent(self) -> Sequence[memoryview]:
        pieces, self._pieces = self._pieces, []
        return pieces

    async def _open_part(self) -> None:
        """Do nothing: the memory of the next part is the caller's."""

    async def _send_unsent(self) -> None:
        await self._hold(self._num_unsent)
        size, self._copied_size = self._copied_size, 0
        await self._copies_budget.acquire(size)
        await super()._send_unsent()
        self._parts[-1].add_done_callback(lambda _: self._copies_budget.release(size))
