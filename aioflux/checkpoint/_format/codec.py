"""Codec: frames of large memory on several threads, in order, a bounded number at a time.

    with Codec(level=1, threads=2) as codec:
        item = codec.encode_item(before, memory, after, element_size=2)
        async for _, segment in codec.encode_items([item]): ...
        table = item.stored(offset)         # a StoredItem, after the last segment

zstandard and numpy release the GIL, so threads are enough. Nothing here does I/O.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aioflux.checkpoint._format.commit import StoredItem
from aioflux.checkpoint._format.frames import (
    END_OF_STREAM,
    FRAME_SIZE_BYTES,
    START_OF_STREAM,
    decode_slice,
    encode_frame,
    frame_bounds,
)
from aioflux.checkpoint._format.methods import (
    Compressor,
    Method,
    plan_methods,
    plan_planes,
    require_zstandard,
)
from aioflux.checkpoint._format.planes import plan_plane_size

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Callable,
        Generator,
        Iterable,
        Iterator,
        Sequence,
    )
    from typing import Self

    from aioflux.checkpoint._format.frames import FrameSlice

__all__ = ["Codec", "EncodedFrames"]

T = TypeVar("T")
_Buffer: TypeAlias = "bytes | bytearray | memoryview"
_EncodedFrame: TypeAlias = "tuple[EncodedFrames, bytes, bytes | bytearray, bytes]"
"""An item, the bytes before a frame of it, the frame, and the bytes after it."""

_RUN_FRAMES = 64
"""Frames with the same methods: the data of a tensor may change from its begin to its end."""

_DECODED_FRAMES = 4
"""Frames that one call decodes: 2 ms, much longer than a call of a thread takes."""

_TRIED_BYTES = 64 * 1024
"""Shorter memory is compressed without samples, which would be as much work."""


class Codec:
    """Compresses and decompresses on its own threads; for one save or load.

    At most `threads + 2` frames of each encoded item are in memory at a time. The threads end with
    the context manager or `close`.
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
        self._max_ahead = threads + 2
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="aioflux-frames")
        require_zstandard()
        self._idle = deque[Compressor]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads after their current calls."""
        self._pool.shutdown(cancel_futures=True)

    def plane_size_of(self, element_size: int) -> int:
        """Return the number of planes of elements of `element_size` bytes."""
        return plan_plane_size(element_size) if self._byte_planes else 1

    def encode(self, memory: _Buffer, *, element_size: int) -> Generator[bytearray]:
        """Yield the frames of memory, in order.

        The memory must not change until the last frame. The element size is guessed if it is 0.
        """
        return self.in_order(self.calls(memory, element_size))

    def encode_item(
        self, before: _Buffer, memory: _Buffer, after: _Buffer, *, element_size: int
    ) -> EncodedFrames:
        """Return a stream of three parts, of which the middle one can be read by ranges."""
        return EncodedFrames(self, before, memory, after, element_size)

    async def encode_items(
        self, items: Iterable[EncodedFrames]
    ) -> AsyncGenerator[tuple[EncodedFrames, bytes | bytearray]]:
        """Yield the segments of items, one item after the other; a few are encoded ahead."""
        calls = chain.from_iterable(item.calls() for item in items)
        async with aclosing(self.in_order_on_loop(calls)) as frames:
            async for item, before, frame, after in frames:
                item.add_frame(frame)
                for segment in (before, frame, after):
                    if segment:
                        yield item, segment

    async def decode(
        self, stored: memoryview, slices: Sequence[FrameSlice], out: memoryview, *, plane_size: int
    ) -> None:
        """Decode frames into `out`.

        Args:
            stored: The bytes from the first slice's `stored_start` to the last's `stored_end`.
            slices: The slices of the frames, by `plan_slices`.
            out: The memory of the whole planned range.
            plane_size: The number of planes that a frame may have, besides 1.

        Raises:
            CheckpointCorruptError: A frame is damaged; `out` is undefined.
        """
        begin = slices[0].stored_start if slices else 0
        calls = (
            partial(_decode, stored, begin, group, out, plane_size)
            for group in (
                slices[at : at + _DECODED_FRAMES] for at in range(0, len(slices), _DECODED_FRAMES)
            )
        )
        async with aclosing(self.in_order_on_loop(calls)) as decoded:
            async for _ in decoded:
                pass

    def in_order(self, calls: Iterator[Callable[[], T]]) -> Generator[T]:
        """Yield the result of each call, in order; calls run on the threads, a few ahead."""
        first, second = next(calls, None), next(calls, None)
        if first is not None and second is None:
            yield first()
            return
        pending = deque[Future[T]]()
        try:
            for call in chain(filter(None, (first, second)), calls):
                pending.append(self._pool.submit(call))
                if len(pending) >= self._max_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            _stop(pending)

    async def in_order_on_loop(self, calls: Iterable[Callable[[], T]]) -> AsyncGenerator[T]:
        """Yield the same without blocking the event loop."""
        pending = deque[Future[T]]()
        try:
            for call in calls:
                pending.append(self._pool.submit(call))
                if len(pending) >= self._max_ahead:
                    yield await asyncio.wrap_future(pending[0])
                    pending.popleft()
            while pending:
                yield await asyncio.wrap_future(pending[0])
                pending.popleft()
        finally:
            _stop(pending)

    def calls(self, memory: _Buffer, element_size: int) -> Iterator[Callable[[], bytearray]]:
        """Yield a call for each frame of memory, which encodes it."""
        view = memoryview(memory).cast("B")
        run_size = _RUN_FRAMES * self.frame_size
        for run_start, run_end in frame_bounds(len(view), run_size):
            run = _SameMethods(self, view[run_start:run_end], element_size)
            for start, end in frame_bounds(run_end - run_start, self.frame_size):
                yield partial(run.encode, start, end)

    def plain_frames(self, data: _Buffer) -> bytes:
        """Return frames of data that is too small to be compressed."""
        view, compressor = memoryview(data), self.acquire_compressor()
        try:
            return b"".join(
                encode_frame(view[start:end], [Method.RAW], compressor)
                for start, end in frame_bounds(len(view), self.frame_size)
            )
        finally:
            self.release_compressor(compressor)

    def acquire_compressor(self) -> Compressor:
        """Return a compressor for one thread, until `release_compressor`."""
        try:
            return self._idle.pop()
        except IndexError:
            return Compressor(self._level)

    def release_compressor(self, compressor: Compressor) -> None:
        """Keep a compressor for another thread."""
        self._idle.append(compressor)


def _stop(pending: deque[Future[T]]) -> None:
    """Cancel calls, and wait for those that run: they read the caller's memory."""
    for future in pending:
        future.cancel()
    wait(pending)


def _decode(
    stored: memoryview,
    begin: int,
    slices: Iterable[FrameSlice],
    out: memoryview,
    plane_size: int,
) -> None:
    for part in slices:
        frame = stored[part.stored_start - begin : part.stored_end - begin]
        decode_slice(frame, part, out, plane_size=plane_size)


class _SameMethods:
    """Frames of a tensor, or of a large range of it, that are encoded by the same methods."""

    def __init__(self, codec: Codec, memory: memoryview, element_size: int) -> None:
        self._codec = codec
        self._memory = memory
        self._element_size = element_size
        self._methods: tuple[Method, ...] = ()

    def encode(self, start: int, end: int) -> bytearray:
        """Return one frame."""
        compressor = self._codec.acquire_compressor()
        try:
            # Two threads that plan at once get the same result.
            methods = self._methods = self._methods or self._plan(compressor)
            return encode_frame(self._memory[start:end], methods, compressor)
        finally:
            self._codec.release_compressor(compressor)

    def _plan(self, compressor: Compressor) -> tuple[Method, ...]:
        element_size = self._element_size or plan_planes(self._memory, compressor)
        plane_size = self._codec.plane_size_of(element_size)
        if plane_size > 1 and len(self._memory) <= _TRIED_BYTES:
            return (Method.ENTROPY,) * plane_size
        return plan_methods(self._memory, plane_size, compressor)


class EncodedFrames:
    """One item as a stream of frames, which `Codec.encode_items` encodes once.

    Args:
        codec: The codec.
        before: Bytes of the item before the tensor's memory.
        memory: Contiguous bytes, which must not change until the last segment.
        after: Bytes of the item after it.
        element_size: Bytes of an element of the tensor.
    """

    def __init__(
        self, codec: Codec, before: _Buffer, memory: _Buffer, after: _Buffer, element_size: int
    ) -> None:
        self._codec = codec
        self._memory = memoryview(memory).cast("B")
        self._element_size = element_size
        self._begin = START_OF_STREAM + codec.plain_frames(before)
        self._end = codec.plain_frames(after) + END_OF_STREAM
        self._frame_ends = list[int]()

    @property
    def num_segments(self) -> int:
        """Number of its segments."""
        return 2 + self._num_frames

    @property
    def _num_frames(self) -> int:
        return len(frame_bounds(len(self._memory), self._codec.frame_size))

    @property
    def length(self) -> int:
        """Bytes of the segments, after the last one."""
        frames = self._frame_ends[-1] if self._frame_ends else 0
        return len(self._begin) + frames + len(self._end)

    def stored(self, offset: int) -> StoredItem:
        """Return the item at `offset` of its object, with its frames, after the last segment.

        Raises:
            ValueError: Segments are missing.
        """
        if len(self._frame_ends) != self._num_frames:
            raise ValueError("the table of an item is known after its last segment")
        return StoredItem(
            offset=offset,
            length=self.length,
            data_start=offset + len(self._begin),
            data_size=len(self._memory),
            frame_size=self._codec.frame_size,
            frame_ends=tuple(self._frame_ends),
            plane_size=self._codec.plane_size_of(self._element_size),
        )

    def calls(self) -> Iterator[Callable[[], _EncodedFrame]]:
        """Yield a call for each frame, which returns it with the bytes around it."""
        last = self._num_frames - 1
        if last < 0:
            yield lambda: (self, self._begin, b"", self._end)
        for index, call in enumerate(self._codec.calls(self._memory, self._element_size)):
            before = self._begin if index == 0 else b""
            yield partial(self._encode, before, call, self._end if index == last else b"")

    def _encode(self, before: bytes, call: Callable[[], bytearray], after: bytes) -> _EncodedFrame:
        return self, before, call(), after

    def add_frame(self, frame: bytes | bytearray) -> None:
        """Add the next frame to the table."""
        if frame:
            end = self._frame_ends[-1] if self._frame_ends else 0
            self._frame_ends.append(end + len(frame))
