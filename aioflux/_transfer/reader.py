"""A stream of an object: pinned to one generation, prefetched in ranges, bounded, verified.

position -> prefetched ranges -> returned -> crc32c of the object, before the last range
"""

from __future__ import annotations

import asyncio
import io
from bisect import bisect_right
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Self

from aioflux._http.memory import BytesBuffer
from aioflux._transfer.arguments import parse_memory
from aioflux._transfer.read import MAX_READS
from aioflux._transfer.read_plan import plan_ranges
from aioflux._transfer.read_range import (
    Pin,
    mismatch_text,
    read_into,
    read_range,
)
from aioflux._values.checksums import combine_crc32c
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

_EDGE_BYTES = 1024 * 1024
"""Size of the first and the last range of an object that does not fit in memory. A directory is
often there, and is read out of order."""

_MAX_GAP_BYTES = 64 * 1024
"""Longest forward seek within a stream. torch.load skips headers and padding of a zip file so."""


class ObjectReader:
    """An object opened for reading at one generation.

    Ranges are prefetched up to `TransferOptions.max_buffered_bytes`, or up to the
    `read_ahead_bytes` of the call that opened the reader. A short read far away requests its bytes.

    If the whole object is read, in any order, its crc32c is compared before the last range is
    returned. After a mismatch, the ranges that were not returned yet are read again, up to two
    times; if the crc32c still differs, ChecksumError is raised and no more bytes are returned.

    If the reader is closed early, the crc32c is never compared. With
    `TransferOptions.verify_ranges` each range is read twice, unless the object is one range whose
    crc32c is known.
    """

    def __init__(
        self, session: Session, meta: ObjectMeta, *, read_ahead_bytes: int | None = None
    ) -> None:
        self.meta = meta
        self._session = session
        self._pin = Pin(meta.generation, meta.size, meta.crc32c)
        self._position = 0
        self._next_position = 0
        options = session.options
        self._max_bytes = read_ahead_bytes or options.max_buffered_bytes
        # Two ranges fit, so that one is consumed while the next one arrives.
        half = max(1, self._max_bytes // 2) if read_ahead_bytes else self._max_bytes
        step = min(options.range_size_bytes, half)
        edge = _EDGE_BYTES if meta.size > self._max_bytes and step >= 8 * _EDGE_BYTES else 0
        # Both edges, and a second copy of one, fit in memory beside the prefetched ranges.
        step = min(step, (self._max_bytes - 3 * edge) // (self._max_bytes // step))
        self._plan = plan_ranges(edge, meta.size - edge, step)
        if edge:
            self._plan = [(0, edge), *self._plan, (meta.size - edge, meta.size)]
        self._ranges: dict[int, asyncio.Task[bytes]] = {}
        self._dropped: set[asyncio.Task[bytes]] = set()
        self._calls: set[asyncio.Task[object]] = set()  # of reads, cancelled by `aclose`
        self._checksums: dict[int, int] = {}
        self._returned: set[int] = set()
        self._last_index = -1  # of the returned ranges; -2 after a jump
        self._read_alone: set[int] = set()  # ranges of which a jump has requested its bytes only
        self._is_reading = False
        self._verified = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel reads in progress, and drop prefetched ranges. A second call has no effect."""
        self._closed = True
        if self._session.is_inherited:
            return
        self._count_unverified()
        self._drop_ranges(set(self._ranges))
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._dropped, *self._calls, return_exceptions=True)

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, as `io.IOBase.seek`; sends no request.

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
        """Read `size` bytes, or all remaining bytes if `size` is negative.

        Returns fewer bytes only at the end of the object, and b"" after the end.

        Raises:
            ChecksumError: The received bytes differ from the stored object.
        """
        num_left = max(0, self.meta.size - self._position)
        buffer = BytesBuffer(num_left if size < 0 else min(size, num_left))
        await self.readinto(buffer.view)
        return buffer.finish()

    async def readinto(self, view: bytearray | memoryview) -> int:
        """Fill writable memory with the next bytes, and return the number of bytes.

        After a failure the position is unchanged. TypeError and ValueError as in `Store.get_into`.
        """
        if self._closed:
            raise ValueError(f"{self.meta.uri} is read from a closed reader")
        self._session.require_own_process(self.meta.key)
        target = parse_memory(view)
        start = self._position
        end = max(start, min(start + target.nbytes, self.meta.size))
        if end > start and not 0 <= start - self._next_position <= _MAX_GAP_BYTES:
            self._last_index = -2
        last, num_filled = self._index(max(start, end - 1)), 0
        self._is_reading = True
        try:
            if self._last_index == -2 and self._is_alone(start, end):
                await self._read_jump(start, target[: end - start])
                num_filled = end - start
                self._read_alone.add(self._index(start))
            while start + num_filled < end:
                index = self._index(start + num_filled)
                data = memoryview(await self._range(index, last))
                offset = start + num_filled - self._plan[index][0]
                piece = data[offset:][: end - start - num_filled]
                target[num_filled : num_filled + piece.nbytes] = piece
                num_filled += piece.nbytes
        finally:
            self._is_reading = False
        if num_filled:
            self._position = self._next_position = end
        return num_filled

    async def prefetch(self) -> None:
        """Start requests for the next ranges, up to the limit of bytes, without waiting.

        A read in progress has started them already. If a request fails, the error is raised by the
        read that needs its range.
        """
        if self._closed:
            raise ValueError(f"{self.meta.uri} is read from a closed reader")
        self._session.require_own_process(self.meta.key)
        if self._position < self.meta.size and not self._is_reading:
            self._start_window(self._index(self._position), len(self._plan) - 1)

    def _index(self, position: int) -> int:
        """Return the index of the range with the byte at `position`."""
        return bisect_right(self._plan, (position, self.meta.size)) - 1

    def _is_alone(self, start: int, end: int) -> bool:
        """Return whether a jump requests its own bytes: the first read of a range far from others.

        A second read of the range requests all of it, because more of its bytes may follow.
        """
        index = self._index(start)
        is_far = 0 < index < len(self._plan) - 1 and index != self._index(self._next_position)
        is_new = index not in self._ranges and index not in self._read_alone
        is_short = 0 < end - start < self._plan[index][1] - self._plan[index][0]
        is_large = self.meta.size > self._max_bytes
        return is_far and is_new and is_short and is_large

    async def _read_jump(self, start: int, piece: memoryview) -> None:
        reading = read_into(
            self._session, self.meta.key, piece, start=start, pin=self._pin, is_hashed=False
        )
        await self._until_closed(reading)
        self._session.count_unverified(piece.nbytes, is_whole=False)

    async def _until_closed(self, call: Coroutine[Any, Any, object]) -> None:
        """Await a call of a read. `aclose` cancels the call, and the read raises StorageError."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            await task
        except asyncio.CancelledError as exc:
            self._raise_if_closed(task, exc)
            raise

    def _combined_checksum(self) -> int:
        checksum = 0
        for index, (start, end) in enumerate(self._plan):
            checksum = combine_crc32c(checksum, self._checksums[index], end - start)
        return checksum

    async def _range(self, index: int, last: int) -> bytes:
        """Return the bytes of a range, and prefetch the next ranges; `last` is needed, too."""
        self._start_window(index, last)
        data = await self._wait_for(index)
        if self._session.options.verify and await self._check_whole():
            data = await self._wait_for(index)
        self._returned.add(index)
        self._last_index = index
        return data

    def _start_window(self, index: int, last: int) -> None:
        """Start to read a range and the next ones that fit in memory; keep others if they fit, too.

        After a jump, ranges after `last` are not prefetched, because the reader may go back.
        """
        is_jump = self._last_index not in {-1, index - 1, index}
        room, window = self._max_bytes, set[int]()
        for i in range(index, last + 1 if is_jump else len(self._plan)):
            size = self._plan[i][1] - self._plan[i][0]
            if window and size > room:
                break
            room -= size
            window.add(i)
            if i not in self._ranges:
                self._start(i)
        # Ranges before this one are needed least.
        for i in sorted(self._ranges.keys() - window, key=lambda i: (i < index, i)):
            room -= self._plan[i][1] - self._plan[i][0]
            if room < 0:
                self._drop_ranges({i})

    def _start(self, index: int) -> None:
        task = self._ranges[index] = asyncio.create_task(self._fetch(index))
        # A range that is never read may fail: mark the failure as retrieved, or asyncio logs it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _wait_for(self, index: int) -> bytes:
        task = self._ranges[index]
        try:
            return await asyncio.shield(task)
        except BaseException as exc:
            # Drop a failed range, so that the next read requests it again.
            if task.done():
                self._ranges.pop(index, None)
            self._raise_if_closed(task, exc)
            raise

    def _raise_if_closed(self, task: asyncio.Task[Any], error: BaseException) -> None:
        """Raise StorageError if `aclose` has cancelled `task`, and the caller was not cancelled."""
        is_cancelled = (asyncio.current_task() or task).cancelling()
        if self._closed and task.cancelled() and not is_cancelled:
            uri = self.meta.uri
            raise StorageError(f"could not read {uri}: its reader was closed", uri=uri) from error

    def _drop_ranges(self, indexes: set[int]) -> None:
        """Cancel the reads of ranges that are no longer needed, and ignore their failures."""
        for index in indexes:
            task = self._ranges.pop(index)
            if not (self._verified or index in self._returned):
                self._checksums.pop(index, None)
            if not task.cancel() and not task.cancelled() and task.exception() is None:
                self._session.memory.offer(task.result())
            self._dropped.add(task)
            task.add_done_callback(self._dropped.discard)

    async def _fetch(self, index: int) -> bytes:
        start, end = self._plan[index]
        buffer = self._session.memory.allocate(end - start)
        # Later reads of a range must match the bytes that were returned, or verified.
        is_known = index in self._returned or self._verified
        for _ in range(MAX_READS):
            checksum = await read_range(
                self._session,
                self.meta.key,
                buffer.view,
                start=start,
                pin=self._pin,
                is_covered=is_known or (len(self._plan) == 1 and self.meta.crc32c is not None),
                is_hashed=self._session.options.verify,
            )
            if not is_known or self._checksums[index] == checksum:
                self._checksums[index] = checksum
                return buffer.finish()
            self._session.count_mismatch(self.meta.key, f"the bytes from {start} on have changed")
        raise self._mismatch(f"bytes [{start}, {end}) were different when they were read again")

    async def _check_whole(self) -> bool:
        """Compare the crc32c of the whole object, if all its ranges have been read.

        Returns:
            Whether ranges were read again after a mismatch.
        """
        expected = self.meta.crc32c
        if self._verified or expected is None or len(self._checksums) < len(self._plan):
            return False
        for number in range(MAX_READS):
            actual = self._combined_checksum()
            if actual == expected:
                self._verified = True
                return number > 0
            self._session.count_mismatch(self.meta.key, mismatch_text(actual, expected))
            if number == MAX_READS - 1:
                break
            unreturned = sorted(self._ranges.keys() - self._returned)
            self._drop_ranges(set(unreturned))
            for index in unreturned:
                self._start(index)
            for index in unreturned:
                await self._wait_for(index)
        raise self._mismatch(mismatch_text(actual, expected))

    def _count_unverified(self) -> None:
        """Count the returned bytes that were read once, unless the whole object was verified."""
        unverified = () if self._verified else self._returned
        num_bytes = sum(self._plan[index][1] - self._plan[index][0] for index in unverified)
        is_whole = len(self._returned) == len(self._plan)
        self._session.count_unverified(num_bytes, is_whole=is_whole)
        self._returned.clear()

    def _mismatch(self, reason: str) -> ChecksumError:
        uri = self.meta.uri
        return ChecksumError(
            f"could not read {uri}: {reason}; open it again, or check the object", uri=uri
        )
