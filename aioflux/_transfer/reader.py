"""A stream of an object: pinned to one generation, prefetched in ranges, bounded, verified.

position -> prefetched ranges -> returned in order -> crc32c of all, before the last one
                 |                     |
                 |                     +-- after a seek or an early end: read again to confirm
                 +-- after a seek: each is read twice at the same time
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Self

from aioflux._concurrency.fan_out import gather
from aioflux._http.memory import BytesBuffer
from aioflux._transfer.get_range import Pin, read_checksum, read_sure, reads_twice
from aioflux._transfer.range_plan import plan_ranges
from aioflux._values.checksums import combine_crc32c
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from types import TracebackType

    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["ObjectReader"]

_log = logging.getLogger("aioflux")

_MAX_READS = 3
"""Reads of a range that does not match before an error is raised."""


class ObjectReader:
    """An object opened for reading at one generation.

    Holds at most `TransferOptions.max_buffered_bytes` of ranges, or the `read_ahead_bytes` that it
    was opened with, and prefetches no further.

    If all of the object is read, in any order, its crc32c is compared before the last of its ranges
    is returned. If it does not match, ranges that were not returned yet are read again; if that
    does not help, an error takes the place of the end. Bytes that no read of the whole will cover,
    because of a seek or an early end, are treated as `verify_ranges` says: if ranges are read
    twice, those after the first seek are, and those returned before it are read a second time then
    ("always" reads every range twice from the start, so that wrong bytes are never returned). So a
    stream from beginning to end costs no more than its bytes, and one with seeks twice as much over
    plain http: 0.74 s instead of 0.37 s for 256 MiB from `GCSServerProcess`, on two shared cores.
    """

    def __init__(
        self, session: Session, meta: ObjectMeta, *, read_ahead_bytes: int | None = None
    ) -> None:
        self.meta = meta
        self._session = session
        self._pin = Pin(meta.generation, meta.size)
        self._position = 0
        self._next_position = 0
        options = session.options
        self._max_held = read_ahead_bytes or options.max_buffered_bytes
        # One range is consumed while another arrives.
        half = max(1, self._max_held // 2) if read_ahead_bytes else self._max_held
        self._step = min(options.range_size_bytes, half)
        self._plan = plan_ranges(0, meta.size, self._step)
        self._ranges: OrderedDict[int, asyncio.Task[bytes]] = OrderedDict()
        self._dropped: set[asyncio.Task[bytes]] = set()
        self._checksums: dict[int, int] = {}
        self._returned: set[int] = set()
        self._confirmed: set[int] = set()
        self._twice = reads_twice(session)
        self._is_sequential = meta.crc32c is not None and options.verify_ranges != "always"
        self._verified = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._closed:
                await self._confirm_at_end()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel and drop prefetched ranges. Closing twice does nothing.

        Bytes that were returned are not verified by this; leaving the `async with` does that.
        """
        self._closed = True
        if self._session.is_inherited:
            return
        self._drop_ranges(set(self._ranges))
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
        """Read up to `size` bytes, all that remain if it is negative.

        Fewer come only at the end, then b"".

        Raises:
            ChecksumError: The bytes are not those that the service holds.
        """
        num_left = max(0, self.meta.size - self._position)
        buffer = BytesBuffer(num_left if size < 0 else min(size, num_left))
        await self.readinto(buffer.view)
        return buffer.finish()

    async def readinto(self, view: bytearray | memoryview) -> int:
        """Fill writable memory from the position on and return how many bytes there were.

        A read that fails leaves the position where it was.
        """
        if self._closed:
            raise ValueError(f"{self.meta.uri} is read from a closed reader")
        self._session.require_own_process(self.meta.key)
        target = memoryview(view).cast("B")
        at = self._position
        end = max(at, min(at + target.nbytes, self.meta.size))
        if end > at and at != self._next_position:
            await self._on_seek()
        filled = 0
        while at + filled < end:
            index, offset = divmod(at + filled, self._step)
            piece = memoryview(await self._range(index))[offset:][: end - at - filled]
            target[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes
        self._position = at + filled
        if filled:
            self._next_position = self._position
        return filled

    async def prefetch(self) -> None:
        """Start requests for the next ranges, as many as may be held, without waiting.

        An error is raised by the read that needs the range.
        """
        if self._closed:
            raise ValueError(f"{self.meta.uri} is read from a closed reader")
        self._session.require_own_process(self.meta.key)
        self._start_window(self._position // self._step)

    def _reads_twice(self) -> bool:
        """Return whether ranges are read twice now, because no read of the whole covers them."""
        return self._twice and not self._is_sequential and not self._verified

    def _combined(self) -> int:
        actual = 0
        for index, (start, end) in enumerate(self._plan):
            actual = combine_crc32c(actual, self._checksums[index], end - start)
        return actual

    async def _range(self, index: int) -> bytes:
        """Return a range, and prefetch those after it."""
        window = self._start_window(index)
        # Only ranges before the position or beyond its window are dropped.
        self._drop_ranges({at for at in self._ranges if not index <= at < index + window})
        data = await self._arrived(index)
        if self._session.options.verify and await self._check_whole():
            data = await self._arrived(index)
        self._returned.add(index)
        return data

    def _window(self) -> int:
        """Return how many ranges may be held; a second copy takes as much memory."""
        ranges = self._max_held // self._step
        return max(1, ranges // 2 if self._reads_twice() else ranges)

    def _start_window(self, index: int) -> int:
        """Start a range and those after it that may be held; return how many may be."""
        window = self._window()
        for wanted in range(index, min(index + window, len(self._plan))):
            if wanted not in self._ranges:
                self._start(wanted)
        return window

    def _start(self, index: int) -> None:
        self._ranges[index] = asyncio.create_task(self._fetch(index))

    async def _arrived(self, index: int) -> bytes:
        task = self._ranges[index]
        try:
            return await asyncio.shield(task)
        except BaseException:
            # A failed range is requested anew by the next read.
            if task.done():
                self._ranges.pop(index, None)
            raise

    def _drop_ranges(self, indexes: set[int]) -> None:
        """Cancel ranges that no read waits for, and ignore their failures."""
        for index in indexes:
            task = self._ranges.pop(index)
            task.cancel()
            self._dropped.add(task)
            task.add_done_callback(self._dropped.discard)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _fetch(self, index: int) -> bytes:
        start, end = self._plan[index]
        buffer = BytesBuffer(end - start)
        # A range that is read again must be what was returned, confirmed or verified before.
        is_known = index in self._returned or index in self._confirmed or self._verified
        twice = self._reads_twice() and index not in self._confirmed
        for _ in range(_MAX_READS):
            checksum = await read_sure(
                self._session,
                self.meta.key,
                buffer.view,
                start=start,
                pin=self._pin,
                twice=twice,
            )
            if not is_known or self._checksums[index] == checksum:
                self._checksums[index] = checksum
                if twice:
                    self._confirmed.add(index)
                return buffer.finish()
        raise self._mismatch(f"bytes [{start}, {end}) came differently when they were read again")

    async def _check_whole(self) -> bool:
        """Compare the whole object's crc32c, once all its ranges have been read.

        Returns:
            Whether ranges were read again.
        """
        expected = self.meta.crc32c
        if self._verified or expected is None or len(self._checksums) < len(self._plan):
            return False
        for number in range(_MAX_READS):
            actual = self._combined()
            if actual == expected:
                self._verified = True
                return number > 0
            again = self._ranges.keys() - self._returned
            self._drop_ranges(set(again))
            for index in sorted(again):
                self._start(index)
            for index in sorted(again):
                await self._arrived(index)
        raise self._mismatch(
            f"its bytes have crc32c {actual:#010x}, but the service returns {expected:#010x}"
        )

    async def _on_seek(self) -> None:
        """Confirm what was returned: after a seek no read of the whole is expected."""
        self._is_sequential = False
        if self._reads_twice():
            self._drop_ranges(self._ranges.keys() - self._returned - self._confirmed)
            await self._confirm_returned()

    async def _confirm_returned(self) -> None:
        """Read a second time what was returned and no checksum covers."""
        await gather(self._confirm(index) for index in sorted(self._returned - self._confirmed))

    async def _confirm(self, index: int) -> None:
        start, end = self._plan[index]
        for _ in range(_MAX_READS - 1):
            checksum = await read_checksum(
                self._session, self.meta.key, start, end - start, self._pin
            )
            if checksum == self._checksums[index]:
                self._confirmed.add(index)
                return
        raise self._mismatch(
            f"bytes [{start}, {end}) were returned and came differently, "
            f"{_MAX_READS - 1} times, when they were read again"
        )

    async def _confirm_at_end(self) -> None:
        """Confirm what was returned by a reader that ends before the object does."""
        self._is_sequential = False
        if not self._reads_twice():
            return
        try:
            await self._confirm_returned()
        except ChecksumError:
            raise
        except StorageError as exc:
            # The bytes may be right, and the object gone by now.
            _log.warning("the bytes read from %s could not be verified: %s", self.meta.uri, exc)

    def _mismatch(self, what: str) -> ChecksumError:
        uri = self.meta.uri
        return ChecksumError(
            f"could not read {uri}: {what}; open it again, or check the object", uri=uri
        )
