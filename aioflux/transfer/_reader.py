"""Reading an object as a stream: pinned, with ranges fetched ahead, bounded."""

from __future__ import annotations

import asyncio
import io
from collections import OrderedDict
from typing import TYPE_CHECKING, Self

from aioflux._errors import ChecksumError
from aioflux.http._memory import BytesBuffer
from aioflux.transfer._checksums import combine_crc32c, crc32c
from aioflux.transfer._download import plan_ranges, read_range

if TYPE_CHECKING:
    from types import TracebackType

    from aioflux._meta import ObjectMeta
    from aioflux.transfer._session import Session

__all__ = ["ObjectReader"]


class ObjectReader:
    """An object opened for reading at one generation.

    Holds at most `TransferOptions.max_buffered_bytes` of ranges, and fetches nothing while nobody
    reads beyond that. Where all of the object is read, in whatever order, its crc32c is compared
    before the last range to arrive is handed out.
    """

    def __init__(self, session: Session, meta: ObjectMeta) -> None:
        self.meta = meta
        self._session = session
        self._position = 0
        self._step = session.options.range_size_bytes
        self._ahead = max(1, session.options.max_buffered_bytes // self._step)
        self._ranges: OrderedDict[int, asyncio.Task[bytes]] = OrderedDict()
        self._dropped: set[asyncio.Task[bytes]] = set()
        self._checksums: dict[int, int] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is fetched ahead and drop it. Closing twice does nothing."""
        self._closed = True
        for task in self._ranges.values():
            self._drop(task)
        self._ranges.clear()
        await asyncio.gather(*self._dropped, return_exceptions=True)

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, as `io.IOBase.seek`; costs no request.

        Raises:
            ValueError: The position would be before the first byte, or `whence` is unknown.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.meta.size}
        if whence not in base:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = base[whence] + offset
        if position < 0:
            raise ValueError(f"cannot seek to byte {position} of {self.meta.uri}")
        self._position = position
        return position

    async def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, all that is left where it is negative.

        Fewer come only at the end, then b"".

        Raises:
            ChecksumError: All of the object was read and does not match its crc32c.
        """
        left = max(0, self.meta.size - self._position)
        buffer = BytesBuffer(left if size < 0 else min(size, left))
        await self.readinto(buffer.view)
        return buffer.finish()

    async def readinto(self, view: bytearray | memoryview) -> int:
        """Fill writable memory from the position on and return how many bytes there were.

        A read that fails leaves the position where it was.
        """
        if self._closed:
            raise ValueError(f"{self.meta.uri} is read from a closed reader")
        target = memoryview(view).cast("B")
        at = self._position
        end = max(at, min(at + target.nbytes, self.meta.size))
        filled = 0
        while at + filled < end:
            index, offset = divmod(at + filled, self._step)
            piece = memoryview(await self._range(index))[offset:][: end - at - filled]
            target[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes
        self._position = at + filled
        return filled

    async def _range(self, index: int) -> bytes:
        last = (self.meta.size - 1) // self._step
        for wanted in range(index, min(index + self._ahead, last + 1)):
            if wanted not in self._ranges:
                self._ranges[wanted] = asyncio.create_task(self._fetch(wanted))
        # Only what lies behind the reader or beyond its window is dropped.
        for held in [at for at in self._ranges if not index <= at < index + self._ahead]:
            self._drop(self._ranges.pop(held))
        task = self._ranges[index]
        try:
            return await asyncio.shield(task)
        except BaseException:
            # One that failed is fetched anew by the next read.
            if task.done():
                self._ranges.pop(index, None)
            raise

    def _drop(self, task: asyncio.Task[bytes]) -> None:
        """Cancel a range that nobody waits for; its failure, if it has one, concerns nobody."""
        task.cancel()
        self._dropped.add(task)
        task.add_done_callback(self._dropped.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _fetch(self, index: int) -> bytes:
        start = index * self._step
        buffer = BytesBuffer(min(self._step, self.meta.size - start))
        await read_range(
            self._session,
            self.meta.key,
            buffer.view,
            start=start,
            generation=self.meta.generation,
        )
        self._verify(index, buffer.view)
        return buffer.finish()

    def _verify(self, index: int, view: memoryview) -> None:
        """Compare the whole object's crc32c once every range of it has been here."""
        expected = self.meta.crc32c
        if expected is None or not self._session.options.verify:
            return
        checksum = crc32c(view)
        # A range that was dropped and fetched again must be what was handed out before.
        if self._checksums.setdefault(index, checksum) != checksum:
            raise self._mismatch("it came differently when one range was read again")
        if len(self._checksums) * self._step < self.meta.size:
            return
        actual = 0
        for at, (start, end) in enumerate(plan_ranges(0, self.meta.size, self._step)):
            actual = combine_crc32c(actual, self._checksums[at], end - start)
        if actual != expected:
            raise self._mismatch(
                f"its bytes have crc32c {actual:#010x}, but the service says {expected:#010x}"
            )

    def _mismatch(self, what: str) -> ChecksumError:
        uri = self.meta.uri
        return ChecksumError(
            f"could not read {uri}: {what}; open it again, or check the object", uri=uri
        )
