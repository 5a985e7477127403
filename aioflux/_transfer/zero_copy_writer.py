"""Writes from the caller's memory without a copy.

    header, tensor, header, tensor, ... -> parts of several memoryviews each -> service

For memory that does not change until the upload is done, such as the staged tensors of a
checkpoint: `write` does not wait for parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._transfer.writer import ObjectWriter

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session

__all__ = ["ZeroCopyWriter"]


class ZeroCopyWriter(ObjectWriter):
    """A writer of memory that must not change until the writer is closed.

    Parts are gathered from the pieces that were written. `write` waits only while more than
    `max_in_flight_bytes` are being sent or wait for it.
    """

    def __init__(self, session: Session, request: WriteRequest) -> None:
        super().__init__(session, request)
        self._pieces: list[memoryview] = []
        self._pieces_size = 0
        self._copied_size = 0
        options = session.options
        self._unsent = ByteBudget(options.max_in_flight_bytes)
        # Not counting those in the part that is gathered.
        self._copies = ByteBudget(max(1, options.max_buffered_bytes - options.part_size_bytes))

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._offset + self._pieces_size

    async def write_copy(self, data: bytes | bytearray | memoryview) -> int:
        """Write a copy of the bytes of `data`, whose memory may be reused when this returns.

        Waits while more than `max_buffered_bytes` of copies are being sent or wait for it.
        """
        view = memoryview(data).cast("B")
        size = view.nbytes
        while view.nbytes:
            # A copy belongs to one part, so that it is released when that was sent.
            free = (self._part_size() - self._pieces_size) or self._part_size()
            piece = bytes(view[:free])
            await self.write(piece)
            self._copied_size += len(piece)
            view = view[free:]
        return size

    async def _add(self, view: memoryview) -> None:
        while view.nbytes:
            # A full part waits for the next byte: what fits one part needs no multipart upload.
            if self._pieces_size == self._part_size():
                await self._send_gathered()
            free = self._part_size() - self._pieces_size
            self._pieces.append(view[:free])
            self._pieces_size += self._pieces[-1].nbytes
            view = view[free:]

    async def _send_gathered(self) -> None:
        await self._begin()
        size, self._pieces_size = self._pieces_size, 0
        pieces, self._pieces = self._pieces, []
        copied_size, self._copied_size = self._copied_size, 0
        await self._unsent.acquire(size)
        if copied_size:
            await self._copies.acquire(copied_size)
        self._raise_failure()
        task = self._start(*pieces)
        task.add_done_callback(lambda task: self._done(task, self._unsent, size))
        if copied_size:
            task.add_done_callback(lambda _: self._copies.release(copied_size))

    async def _flush(self) -> None:
        if self._initiating is None:
            # One request sends one piece of memory, and this is at most one part.
            self._buffer = bytearray().join(self._pieces)
            self._pieces = []
            self._pieces_size = 0
        elif self._pieces_size:
            await self._send_gathered()

    async def abort(self, reason: BaseException | None = None) -> None:
        """Abort as `ObjectWriter.abort`; the memory is the caller's again."""
        self._pieces = []
        await super().abort(reason)
