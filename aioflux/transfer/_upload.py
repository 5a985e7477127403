"""Writing objects: one request where they are small, a multipart upload where they are large.

    caller's memory -> parts (memoryviews, or one buffer each where writes are small)
        -> crc32c of each -> service
        -> complete, which makes the object visible whole -> its crc32c against the parts', combined

An error, a cancellation or an exception in the `async with` body aborts the upload: nothing becomes
visible and nothing stays.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from aioflux._errors import (
    AiofluxError,
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)
from aioflux.service._base import Precondition, Source
from aioflux.transfer._checksums import combine_crc32c, crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from aioflux._meta import ObjectMeta
    from aioflux.service._base import UploadedPart
    from aioflux.transfer._session import Session

__all__ = ["ObjectWriter", "WriteRequest", "plan_part_size", "put", "unmet"]

_ABORT_SECONDS = 30.0
"""Time that an abort may take after the caller was cancelled."""

TEMPORARY_PREFIX = ".aioflux-uploads/"
"""Conditional uploads of several parts grow here, below the store's prefix, until they are made
visible."""


def plan_part_size(number: int, part_size_bytes: int) -> int:
    """Return the size of part `number`, from 1, in bytes.

    The size doubles every 900 parts, so that 10,000 parts hold the largest object (5 TiB) whatever
    the first size is: even with 5 MiB they hold 900 x 5 MiB x (1 + 2 + ... + 2^10), which is 8.8
    TiB.
    """
    return min(part_size_bytes << ((number - 1) // 900), 5 * 1024**3)


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What to write where, and under which condition."""

    key: str
    """Key of the object."""
    precondition: Precondition = field(default_factory=Precondition)
    """What must hold for the write."""
    content_type: str = ""
    """Media type; empty for the service's default."""
    metadata: Mapping[str, str] | None = None
    """The user's own metadata."""


def unmet(error: PreconditionFailedError, precondition: Precondition) -> StorageError:
    """Return the error that a caller expects for a condition that did not hold."""
    if not precondition.if_absent:
        return error
    return AlreadyExistsError(
        f"could not create {error.uri}: an object of this name exists; "
        'mode="overwrite" replaces it',
        uri=error.uri,
        status=error.status,
    )


async def put(session: Session, request: WriteRequest, data: memoryview) -> ObjectMeta:
    """Write a whole object that is in memory: one request, or parts in parallel."""
    if data.nbytes > session.options.part_size_bytes:
        async with ObjectWriter(session, request) as writer:
            await writer.write(data)
        return writer.meta
    return await put_once(session, request, data)


async def put_once(session: Session, request: WriteRequest, data: memoryview) -> ObjectMeta:
    """Write a whole object in one request.

    A conditional write whose answer was lost is resolved by looking.
    """
    # Also compared with the stored object below, so it is needed where it is not sent, too.
    checksum = crc32c(data)

    async def attempt(number: int) -> ObjectMeta:
        try:
            return await session.service.put(
                request.key,
                data,
                crc32c=checksum if session.options.verify else None,
                precondition=request.precondition,
                content_type=request.content_type,
                metadata=request.metadata,
            )
        except PreconditionFailedError as exc:
            if number > 1 and (meta := await _our_own(session, request.key, data.nbytes, checksum)):
                return meta
            raise unmet(exc, request.precondition) from exc

    meta = await session.call(request.key, attempt, num_bytes=data.nbytes)
    await _compare(session, meta, checksum)
    return meta


async def _our_own(session: Session, key: str, size: int, checksum: int) -> ObjectMeta | None:
    """Return the object if it is what an earlier attempt wrote, before its answer was lost."""
    try:
        meta = await session.service.head(key)
    except NotFoundError:
        return None
    return meta if (meta.size, meta.crc32c) == (size, checksum) else None


async def _compare(session: Session, meta: ObjectMeta, checksum: int) -> None:
    if not session.options.verify or meta.crc32c in {None, checksum}:
        return
    error = ChecksumError(
        f"could not write {meta.uri}: the stored object has crc32c {meta.crc32c:#010x}, what was "
        f"sent has {checksum:#010x}; the stored object was removed, write it again",
        uri=meta.uri,
    )
    try:
        await session.call(
            meta.key, lambda _: session.service.delete(meta.key, generation=meta.generation)
        )
    except StorageError as exc:
        error.add_note(f"the stored object could not be removed: {exc}")
    raise error


class ObjectWriter:
    """An object under construction; visible, whole, when the `async with` body ends well.

    Holds at most `TransferOptions.max_buffered_bytes`; `write` waits while that much is under way.
    Up to one part in all is one request, more is a multipart upload with parts in parallel.

    Attributes:
        meta: Metadata of the object, once it is visible.
    """

    meta: ObjectMeta

    def __init__(self, session: Session, request: WriteRequest) -> None:
        self._session = session
        self._request = request
        # A multipart upload knows no precondition
        # (cloud.google.com/storage/docs/multipart-uploads), so that a conditional one grows under
        # another key and becomes visible by a compose, which does.
        staged = (
            bool(request.precondition) and not session.service.capabilities.conditional_complete
        )
        self._key = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}" if staged else request.key
        self._staged = staged
        self._upload_id = ""
        self._begun: asyncio.Task[str] | None = None
        self._buffer = bytearray()
        self._parts: list[asyncio.Task[tuple[UploadedPart, int]]] = []
        self._num_started = 0
        self._offset = 0
        # A part is held from its first byte in the buffer until it is stored.
        held = session.options.max_buffered_bytes // session.options.part_size_bytes
        self._places = asyncio.Semaphore(max(1, held - 1))
        self._failure: BaseException | None = None
        self._completing = False
        self._closed = False

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
        """Take the bytes of `data` and return how many they are.

        The memory may be used again when this returns. Memory of many parts is sent from where it
        is, without a copy.

        Raises:
            StorageError: A part that was sent before could not be stored.
            ValueError: The writer is closed.
        """
        if self._closed:
            raise ValueError(f"{self._uri} is written through a closed writer")
        self._raise_failure()
        view = memoryview(data).cast("B")
        size = view.nbytes
        try:
            await self._take(view)
        except BaseException as exc:
            self._failure = self._failure or exc
            raise
        return size

    async def _take(self, view: memoryview) -> None:
        part_size = self._part_size()
        if not self._buffer and view.nbytes >= 2 * self._session.options.max_buffered_bytes:
            view = await self._write_from_caller(view)
            part_size = self._part_size()
        while view.nbytes:
            room = part_size - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            # A full buffer waits for the next byte: what fits one part needs no multipart upload.
            if len(self._buffer) == part_size and view.nbytes:
                await self._flush()
                part_size = self._part_size()

    async def aclose(self) -> None:
        """Send what is left and make the object visible. Closing twice does nothing.

        Raises:
            StorageError: Something of it could not be stored; nothing became visible.
        """
        if self._closed:
            return
        try:
            self._raise_failure()
            if self._begun is None:
                self.meta = await put_once(self._session, self._request, memoryview(self._buffer))
            else:
                self.meta = await self._complete()
        except BaseException as exc:
            await self.abort(exc)
            raise
        self._closed = True
        if self._staged:
            # Shielded: it would be billed until somebody cleans up.
            await asyncio.shield(self._remove_staged())

    async def abort(self, reason: BaseException | None = None) -> None:
        """Drop what was written; a failure to clean up is noted on `reason`."""
        if self._closed:
            return
        self._closed = True
        self._buffer = bytearray()
        try:
            # Shielded: the upload is billed until it is aborted, also where the caller was
            # cancelled, and cancelled again.
            await asyncio.shield(asyncio.wait_for(self._clean_up(), _ABORT_SECONDS))
        except (AiofluxError, TimeoutError) as exc:
            note = f"the upload of {self._uri} could not be aborted: {exc}"
            if reason is None:
                exc.add_note(note)
                raise
            reason.add_note(note)

    @property
    def _uri(self) -> str:
        return self._session.service.uri(self._request.key)

    def _part_size(self) -> int:
        return plan_part_size(self._num_started + 1, self._session.options.part_size_bytes)

    async def _clean_up(self) -> None:
        for task in self._parts:
            task.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        if self._begun is None:
            return
        [begun] = await asyncio.gather(self._begun, return_exceptions=True)
        if isinstance(begun, BaseException):
            return  # it never began, and who wrote was told
        service = self._session.service
        await self._session.call(self._key, lambda _: service.abort_upload(self._key, begun))
        if self._staged and self._completing:
            await self._delete_staged()

    async def _begin(self) -> None:
        if self._begun is None:
            # A task of its own: cancelled between the service's yes and our hearing it, the upload
            # would stay open.
            self._begun = asyncio.create_task(self._initiate())
        self._upload_id = await asyncio.shield(self._begun)

    async def _initiate(self) -> str:
        request = self._request
        return await self._session.call(
            self._key,
            lambda _: self._session.service.initiate_upload(
                self._key, content_type=request.content_type, metadata=request.metadata
            ),
        )

    async def _flush(self) -> None:
        """Send the buffer as one part, in the background, once there is a place for it."""
        await self._begin()
        await self._places.acquire()
        self._raise_failure()
        part, self._buffer = self._buffer, bytearray()
        task = self._start(memoryview(part))
        task.add_done_callback(self._part_done)

    async def _write_from_caller(self, view: memoryview) -> memoryview:
        """Send whole parts out of the caller's memory, wait for them, and return what is left."""
        await self._begin()
        started: list[asyncio.Task[tuple[UploadedPart, int]]] = []
        while view.nbytes > (size := self._part_size()):
            started.append(self._start(view[:size]))
            view = view[size:]
        try:
            await asyncio.wait(started, return_when=asyncio.FIRST_EXCEPTION)
            for task in started:
                if task.done():
                    task.result()
        except BaseException:
            # The memory is the caller's again when this is over.
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
            raise
        return view

    def _start(self, view: memoryview) -> asyncio.Task[tuple[UploadedPart, int]]:
        self._num_started += 1
        task = asyncio.create_task(self._send_part(self._num_started, view, self._offset))
        self._offset += view.nbytes
        self._parts.append(task)
        return task

    def _part_done(self, task: asyncio.Task[tuple[UploadedPart, int]]) -> None:
        self._places.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

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
        self, number: int, view: memoryview, offset: int
    ) -> tuple[UploadedPart, int]:
        session = self._session
        checksum = crc32c(view)
        sent = checksum if session.options.verify else None
        part = await session.call(
            self._key,
            lambda _: session.service.put_part(
                self._key, self._upload_id, number, (view,), offset=offset, crc32c=sent
            ),
            num_bytes=view.nbytes,
        )
        return part, checksum

    async def _complete(self) -> ObjectMeta:
        if self._buffer:
            await self._flush()
        parts: list[UploadedPart] = []
        checksum = 0
        for task in self._parts:
            part, part_checksum = await task
            parts.append(part)
            checksum = combine_crc32c(checksum, part_checksum, part.size)
        self._completing = True
        meta = await self._complete_upload(parts, checksum)
        await _compare(self._session, meta, checksum)
        return await self._reveal(meta) if self._staged else meta

    async def _complete_upload(self, parts: list[UploadedPart], checksum: int) -> ObjectMeta:
        session = self._session
        size = sum(part.size for part in parts)
        precondition = Precondition() if self._staged else self._request.precondition

        async def attempt(number: int) -> ObjectMeta:
            try:
                return await session.service.complete_upload(
                    self._key, self._upload_id, parts, precondition=precondition
                )
            except (NotFoundError, PreconditionFailedError) as exc:
                # An upload is gone once it is complete: the answer to an earlier attempt may have
                # been lost.
                if number > 1 and (meta := await _our_own(session, self._key, size, checksum)):
                    return meta
                if isinstance(exc, PreconditionFailedError):
                    raise unmet(exc, precondition) from exc
                raise

        return await session.call(self._key, attempt)

    async def _reveal(self, staged: ObjectMeta) -> ObjectMeta:
        """Make a staged object visible under its own key, if the precondition holds."""
        session, request = self._session, self._request
        source = Source(key=staged.key, generation=staged.generation)

        async def attempt(number: int) -> ObjectMeta:
            try:
                return await session.service.compose(
                    request.key,
                    [source],
                    precondition=request.precondition,
                    content_type=request.content_type,
                    metadata=request.metadata,
                )
            except PreconditionFailedError as exc:
                if number > 1 and staged.crc32c is not None:
                    meta = await _our_own(session, request.key, staged.size, staged.crc32c)
                    if meta is not None:
                        return meta
                raise unmet(exc, request.precondition) from exc

        return await session.call(request.key, attempt)

    async def _delete_staged(self) -> None:
        with suppress(NotFoundError):
            await self._session.call(self._key, lambda _: self._session.service.delete(self._key))

    async def _remove_staged(self) -> None:
        if not self._completing:
            return  # it was small enough for one request, which takes a precondition
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._delete_staged()
        except (AiofluxError, TimeoutError) as exc:
            uri = self._session.service.uri(self._key)
            raise StorageError(
                f"{self._uri} was written, but its temporary object {uri} is still there; "
                "delete it",
                uri=uri,
            ) from exc
