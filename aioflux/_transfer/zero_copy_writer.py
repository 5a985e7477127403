"""Writes from the caller's memory without a copy.

    header, tensor, header, tensor, ... -> parts of several memoryviews each -> service

`write` returns before its bytes are sent. So it is for memory that does not change until the upload
is complete, such as the staged tensors of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._transfer.arguments import parse_data
from aioflux._transfer.writer import ObjectWriter

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session


class ZeroCopyWriter(ObjectWriter):
    """A writer of memory that must not change until the writer is closed.

    A part is made of the pieces of memory that were written. `write` waits while the upload is
    initiated, and while more than `max_in_flight_bytes` would be in parts that are not sent yet.
    """

    def __init__(self, session: Session, request: WriteRequest) -> None:
        super().__init__(session, request)
        self._pieces: list[memoryview] = []
        self._pieces_size = 0
        self._copied_size = 0
        options = session.options
        self._unsent_budget = ByteBudget(options.max_in_flight_bytes)
        # The copies in the current part are not counted, so one part is subtracted.
        self._copies_budget = ByteBudget(
            max(1, options.max_buffered_bytes - options.part_size_bytes)
        )

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._offset + self._pieces_size

    async def write_copy(self, data: bytes | bytearray | memoryview) -> int:
        """Write a copy of the bytes of `data`, whose memory may be reused when this returns.

        Waits while more than `max_buffered_bytes` of copies are being sent or queued.
        """
        view = parse_data(self._request.key, data)
        size = view.nbytes
        while view.nbytes:
            # A copy belongs to one part only, so that its memory is freed after that part is sent.
            free = (self._part_size() - self._pieces_size) or self._part_size()
            piece = bytes(view[:free])
            await self.write(piece)
            self._copied_size += len(piece)
            view = view[free:]
        return size

    async def _add(self, view: memoryview) -> None:
        while view.nbytes:
            # A full part is sent when the next byte is written: an object of one part needs no
            # multipart upload.
            if self._pieces_size == self._part_size():
                await self._send_gathered()
            free = self._part_size() - self._pieces_size
            self._pieces.append(view[:free])
            self._pieces_size += self._pieces[-1].nbytes
            view = view[free:]

    async def _send_gathered(self) -> None:
        await self._start_upload()
        size, self._pieces_size = self._pieces_size, 0
        pieces, self._pieces = self._pieces, []
        copied_size, self._copied_size = self._copied_size, 0
        await self._unsent_budget.acquire(size)
        if copied_size:
            await self._copies_budget.acquire(copied_size)
        self._raise_failure()
        task = self._start_part(*pieces)
        task.add_done_callback(lambda task: self._on_part_done(task, self._unsent_budget, size))
        if copied_size:
            task.add_done_callback(lambda _: self._copies_budget.release(copied_size))

    async def _flush(self) -> Sequence[memoryview]:
        if self._initiating is not None and self._pieces_size:
            await self._send_gathered()
        return self._pieces

    async def abort(self, reason: BaseException | None = None) -> None:
        """Abort like `ObjectWriter.abort`; afterwards the caller may change the memory."""
        self._pieces = []
        await super().abort(reason)
