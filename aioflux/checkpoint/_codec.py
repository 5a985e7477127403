"""Codec: frames of large memory on several threads, in order, few of them at a time.

    with Codec(level=1, threads=2) as codec:
        item = codec.encode_item(before, memory, after, element_size=2)
        for segment in item: ...            # or `async for`, where an event loop must not wait
        table = item.stored(offset)         # a StoredItem, once all segments were taken

zstandard and numpy release the GIL, so threads are enough.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aioflux.checkpoint._commit import StoredItem
from aioflux.checkpoint._frames import (
    END_OF_STREAM,
    FRAME_SIZE_BYTES,
    START_OF_STREAM,
    decode_slice,
    encode_frame,
    frame_bounds,
)
from aioflux.checkpoint._methods import (
    Compressor,
    Method,
    plan_methods,
    plan_planes,
    require_zstandard,
)
from aioflux.checkpoint._planes import plan_plane_size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
    from typing import Self

    from aioflux.checkpoint._frames import FrameSlice

__all__ = ["Codec", "EncodedFrames"]

T = TypeVar("T")
_Buffer: TypeAlias = "bytes | bytearray | memoryview"

_RUN_FRAMES = 64
"""Frames that are stored by one plan: what is in a tensor may change on the way through it."""


class Codec:
    """Compresses and decompresses on threads of its own; for one save or load.

    At most `threads + 2` frames are held at a time for each thing that is encoded. Leave it, as a
    context manager or by `close`: its threads end then.
    """

    def __init__(
        self,
        *,
        level: int = 1,
        threads: int = 2,
        byte_planes: bool = True,
        frame_size: int = FRAME_SIZE_BYTES,
    ) -> None:
        self.frame_size = frame_size
        self._level = level
        self._byte_planes = byte_planes
        self._ahead = threads + 2
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="aioflux-frames")
        require_zstandard()
        self._idle = deque[Compressor]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, once they have done what they are at."""
        self._pool.shutdown(cancel_futures=True)

    def plane_size_of(self, element_size: int) -> int:
        """Return into how many planes elements of so many bytes are split."""
        return plan_plane_size(element_size) if self._byte_planes else 1

    def encode(self, memory: _Buffer, *, element_size: int) -> Generator[bytearray]:
        """Yield the frames of some memory, in order.

        Args:
            memory: Contiguous bytes; they stay as they are until the last frame is there.
            element_size: Bytes of an element; 0 where that is unknown, and guessed.
        """
        return self.in_order(self.calls(memory, element_size))

    def encode_item(
        self, before: _Buffer, memory: _Buffer, after: _Buffer, *, element_size: int
    ) -> EncodedFrames:
        """Return a stream of three parts, the middle one of which can be read by ranges.

        Args:
            before: What the item has before the tensor's memory.
            memory: Contiguous bytes; they stay as they are until the last segment is there.
            after: What it has behind.
            element_size: Bytes of an element of the tensor.
        """
        return EncodedFrames(self, before, memory, after, element_size)

    async def decode(
        self, stored: memoryview, slices: Sequence[FrameSlice], out: memoryview, *, plane_size: int
    ) -> None:
        """Write what frames hold into `out`.

        Args:
            stored: The bytes from the first slice's `stored_start` to the last's `stored_end`.
            slices: What is needed of which frames, by `plan_slices`.
            out: The memory of the whole range that was planned.
            plane_size: How many planes a frame may have, beside 1.

        Raises:
            CheckpointCorruptError: A frame is damaged. What `out` holds is undefined then.
        """
        begin = slices[0].stored_start if slices else 0
        calls = (
            partial(
                decode_slice,
                stored[part.stored_start - begin : part.stored_end - begin],
                part,
                out,
                plane_size=plane_size,
            )
            for part in slices
        )
        async for _ in self.in_order_on_loop(calls):
            pass

    def in_order(self, calls: Iterator[Callable[[], T]]) -> Generator[T]:
        """Yield what each call returns, in order; each runs on a thread, and a few ahead."""
        first, second = next(calls, None), next(calls, None)
        if first is not None and second is None:
            yield first()
            return
        pending = deque[Future[T]]()
        try:
            for call in chain(filter(None, (first, second)), calls):
                pending.append(self._pool.submit(call))
                if len(pending) >= self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            _stop(pending)

    async def in_order_on_loop(self, calls: Iterable[Callable[[], T]]) -> AsyncIterator[T]:
        """Yield the same to a coroutine, whose loop goes on meanwhile."""
        pending = deque[Future[T]]()
        try:
            for call in calls:
                pending.append(self._pool.submit(call))
                if len(pending) >= self._ahead:
                    yield await asyncio.wrap_future(pending[0])
                    pending.popleft()
            while pending:
                yield await asyncio.wrap_future(pending[0])
                pending.popleft()
        finally:
            _stop(pending)

    def calls(self, memory: _Buffer, element_size: int) -> Iterator[Callable[[], bytearray]]:
        """Yield what makes the frames of some memory, one call each."""
        view = memoryview(memory).cast("B")
        run_size = _RUN_FRAMES * self.frame_size
        for run_start, run_end in frame_bounds(len(view), run_size):
            run = _Run(self, view[run_start:run_end], element_size)
            for start, end in frame_bounds(run_end - run_start, self.frame_size):
                yield partial(run.encode, start, end)

    def take_compressor(self) -> Compressor:
        """Return one that nobody else uses until it is given back."""
        try:
            return self._idle.pop()
        except IndexError:
            return Compressor(self._level)

    def give_back(self, compressor: Compressor) -> None:
        """Take it back."""
        self._idle.append(compressor)


def _stop(pending: deque[Future[T]]) -> None:
    """Let no call begin any more, and wait for those that have: they read the caller's memory."""
    for future in pending:
        future.cancel()
    wait(pending)


class _Run:
    """Frames of one tensor, or of a large piece of it, that are stored by one plan."""

    def __init__(self, codec: Codec, memory: memoryview, element_size: int) -> None:
        self._codec = codec
        self._memory = memory
        self._element_size = element_size
        self._methods: tuple[Method, ...] = ()

    def encode(self, start: int, end: int) -> bytearray:
        """Return one frame."""
        compressor = self._codec.take_compressor()
        try:
            # Two threads that plan at once come to the same plan.
            methods = self._methods = self._methods or self._plan(compressor)
            return encode_frame(self._memory[start:end], methods, compressor)
        finally:
            self._codec.give_back(compressor)

    def _plan(self, compressor: Compressor) -> tuple[Method, ...]:
        if self._element_size:
            plane_size = self._codec.plane_size_of(self._element_size)
        else:
            plane_size = self._codec.plane_size_of(plan_planes(self._memory, compressor))
        return plan_methods(self._memory, plane_size, compressor)


class EncodedFrames:
    """One item as a stream of frames; its segments can be taken once, in either way."""

    def __init__(
        self, codec: Codec, before: _Buffer, memory: _Buffer, after: _Buffer, element_size: int
    ) -> None:
        self._codec = codec
        self._before = before
        self._memory = memoryview(memory).cast("B")
        self._after = after
        self._element_size = element_size
        self._data_start = 0
        self._frame_ends = list[int]()
        self._length = 0

    def __iter__(self) -> Iterator[_Buffer]:
        yield self._begin()
        for frame in self._codec.encode(self._memory, element_size=self._element_size):
            yield self._took(frame)
        yield self._end()

    async def __aiter__(self) -> AsyncIterator[_Buffer]:
        yield self._begin()
        calls = self._codec.calls(self._memory, self._element_size)
        async for frame in self._codec.in_order_on_loop(calls):
            yield self._took(frame)
        yield self._end()

    def stored(self, offset: int) -> StoredItem:
        """Return where everything lies, once all segments were taken.

        Args:
            offset: Where the item begins in its object.
        """
        if not self._length:
            raise ValueError("an item has a table when all of its segments were taken")
        return StoredItem(
            offset=offset,
            length=self._length,
            data_start=offset + self._data_start,
            data_size=len(self._memory),
            frame_size=self._codec.frame_size,
            frame_ends=tuple(self._frame_ends),
            plane_size=self._codec.plane_size_of(self._element_size),
        )

    def _begin(self) -> bytes:
        segment = START_OF_STREAM + self._plain(self._before)
        self._data_start = len(segment)
        return segment

    def _took(self, frame: bytearray) -> bytearray:
        self._frame_ends.append((self._frame_ends[-1] if self._frame_ends else 0) + len(frame))
        return frame

    def _end(self) -> bytes:
        segment = self._plain(self._after) + END_OF_STREAM
        end = self._frame_ends[-1] if self._frame_ends else 0
        self._length = self._data_start + end + len(segment)
        return segment

    def _plain(self, data: _Buffer) -> bytes:
        """Return frames of what is too small to be compressed."""
        compressor = self._codec.take_compressor()
        try:
            return b"".join(
                encode_frame(memoryview(data)[start:end], [Method.RAW], compressor)
                for start, end in frame_bounds(len(data), self._codec.frame_size)
            )
        finally:
            self._codec.give_back(compressor)
