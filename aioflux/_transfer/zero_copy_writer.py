"""BorrowingWriter: writes from the caller's memory, in however many pieces it lies.

    header, tensor, header, tensor, ... -> parts of several memoryviews each -> service

It is for what is known to stay as it is until the upload is done, such as the tensors of a
checkpoint that were staged: nothing is copied, and nobody waits for a part but the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._transfer.limits import ByteBudget
from aioflux._transfer.writer import ObjectWriter

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session

__all__ = ["BorrowingWriter"]


class BorrowingWriter(ObjectWriter):
    """The writer of memory that stays as it is until the writer is closed.

    Parts are gathered from what was written, in however many pieces it lies, and sent from there.
    `write` waits only while more than `max_in_flight_bytes` are on their way or in line.
    """

    def __init__(self, session: Session, request: WriteRequest) -> None:
        super().__init__(session, request)
        self._pieces: list[memoryview] = []
        self._num_gathered = 0
        self._num_copied = 0
        options = session.options
        self._unsent = ByteBudget(options.max_in_flight_bytes)
        # Beside those in the part that is gathered.
        self._copies = ByteBudget(max(1, options.max_buffered_bytes - options.part_size_bytes))

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._offset + self._num_gathered

    async def write_copy(self, data: bytes | bytearray | memoryview) -> int:
        """Take a copy of the bytes of `data`, whose memory may be used again when this returns.

        Waits while more than `max_buffered_bytes` of copies are on their way or in line.
        """
        view = memoryview(data).cast("B")
        size = view.nbytes
        while view.nbytes:
            # What is copied lies in one part, so that it is known when it was sent.
            room = (self._part_size() - self._num_gathered) or self._part_size()
            piece = bytes(view[:room])
            await self.write(piece)
            self._num_copied += len(piece)
            view = view[room:]
        return size

    async def _take(self, view: memoryview) -> None:
        while view.nbytes:
            # A full part waits for the next byte: what fits one part needs no multipart upload.
            if self._num_gathered == self._part_size():
                await self._send_gathered()
            room = self._part_size() - self._num_gathered
            self._pieces.append(view[:room])
            self._num_gathered += self._pieces[-1].nbytes
            view = view[room:]

    async def _send_gathered(self) -> None:
        await self._begin()
        size, self._num_gathered = self._num_gathered, 0
        pieces, self._pieces = self._pieces, []
        num_copied, self._num_copied = self._num_copied, 0
        await self._unsent.acquire(size)
        if num_copied:
            await self._copies.acquire(num_copied)
        self._raise_failure()
        task = self._start(*pieces)
        task.add_done_callback(lambda task: self._done(task, self._unsent, size))
        if num_copied:
            task.add_done_callback(lambda _: self._copies.release(num_copied))

    async def _flush(self) -> None:
        if self._begun is None:
            # One request takes one piece of memory, and this is at most one part.
            self._buffer = bytearray().join(self._pieces)
            self._pieces = []
            self._num_gathered = 0
        elif self._num_gathered:
            await self._send_gathered()

    async def abort(self, reason: BaseException | None = None) -> None:
        """As `ObjectWriter.abort`; the memory is the caller's again."""
        self._pieces = []
        await super().abort(reason)
