"""Packer: the bytes of a data object, a sequence of items. Codec: compresses them on threads.

    with Codec(level=1, threads=2) as codec:
        item = codec.encode_item(before, memory, after, element_size=2)
        async for _, segment in codec.encode_items([item]): ...
        stored_item = item.stored(offset)   # a StoredItem, known after the last segment

The results are in order. zstandard and numpy release the GIL, so threads are enough. Neither class
does I/O.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeVar

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
    plan_plane_size,
    plan_planes,
    require_zstandard,
)

if TYPE_CHECKING:
    from aioflux.checkpoint._format.frames import FrameSlice

T = TypeVar("T")
_Buffer: TypeAlias = "bytes | bytearray | memoryview"
_EncodedFrame: TypeAlias = "tuple[EncodedFrames, bytes, bytes | bytearray, bytes]"
"""An item, then three segments of it: bytes before a frame, the frame, bytes after the frame."""

_GROUP_FRAMES = 64
"""Consecutive frames that are compressed by the same methods. The next frames may need other
methods, since values may change along a tensor."""

_DECODE_BATCH_FRAMES = 4
"""Frames that one call on a thread decodes in 2 ms, much longer than its hand-off takes."""

_MAX_UNSAMPLED_BYTES = 64 * 1024
"""Memory up to this size is not sampled: sampling would cost as much as compressing."""

ALIGNMENT_BYTES: Final = 64
"""Alignment of items in a data object, and of a tensor's data in its item."""

_MIN_COMPRESSED_BYTES: Final = 16 * 1024
"""Smaller tensors are not compressed: a separate frame costs 0.4 ms, the time that 150 KiB of a
large tensor take."""


class Codec:
    """Encoder and decoder of frames on its own threads, for one save or one load.

    An encode keeps at most `threads + 2` frames in memory. `close` stops the threads, and so does
    the end of a `with` block.
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
        self._max_pending = threads + 2
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="aioflux-frames")
        require_zstandard()
        self._idle = deque[Compressor]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel calls that have not started, and stop the threads after their current calls."""
        self._pool.shutdown(cancel_futures=True)

    def plane_size_of(self, element_size: int) -> int:
        """Return the number of planes for elements of `element_size` bytes; 1 if not split."""
        return plan_plane_size(element_size) if self._byte_planes else 1

    def encode(self, memory: _Buffer, *, element_size: int) -> Generator[bytearray]:
        """Yield the frames of memory, in order.

        The memory must not change before the last frame is yielded. An element size of 0 means
        that the size is unknown; the codec then guesses it from samples.
        """
        return self.in_order(self.encoders(memory, element_size))

    def encode_item(
        self, before: _Buffer, memory: _Buffer, after: _Buffer, *, element_size: int
    ) -> EncodedFrames:
        """Return an item of three parts. Loads can read ranges of the middle part, `memory`."""
        return EncodedFrames(self, before, memory, after, element_size)

    async def encode_items(
        self, items: Iterable[EncodedFrames]
    ) -> AsyncGenerator[tuple[EncodedFrames, bytes | bytearray]]:
        """Yield the segments of all items in order, each with its item.

        A few frames are encoded before the caller requests them.
        """
        calls = chain.from_iterable(item.encoders() for item in items)
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
            stored: The bytes from the first slice's `stored_start` to the last slice's
                `stored_end`.
            slices: The result of `plan_slices`.
            out: Memory for the decoded bytes of the range that `plan_slices` was called with.
            plane_size: The number of planes that a frame may have. One plane is always allowed.

        Raises:
            CheckpointCorruptError: A frame is damaged; the content of `out` is undefined.
        """
        begin = slices[0].stored_start if slices else 0
        calls = (
            partial(_decode, stored, begin, slices[i : i + _DECODE_BATCH_FRAMES], out, plane_size)
            for i in range(0, len(slices), _DECODE_BATCH_FRAMES)
        )
        async with aclosing(self.in_order_on_loop(calls)) as decoded:
            async for _ in decoded:
                pass

    def in_order(self, calls: Iterator[Callable[[], T]]) -> Generator[T]:
        """Yield the result of each call, in order.

        The calls run on the threads; a single call runs on the caller's thread.
        """
        first, second = next(calls, None), next(calls, None)
        if first is not None and second is None:
            yield first()
            return
        pending = deque[Future[T]]()
        try:
            for call in chain(filter(None, (first, second)), calls):
                pending.append(self._pool.submit(call))
                if len(pending) >= self._max_pending:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            _stop(pending)

    async def in_order_on_loop(self, calls: Iterable[Callable[[], T]]) -> AsyncGenerator[T]:
        """Yield the result of each call, in order, without blocking the event loop."""
        pending = deque[Future[T]]()
        try:
            for call in calls:
                pending.append(self._pool.submit(call))
                if len(pending) >= self._max_pending:
                    yield await asyncio.wrap_future(pending[0])
                    pending.popleft()
            while pending:
                yield await asyncio.wrap_future(pending[0])
                pending.popleft()
        finally:
            _stop(pending)

    def encoders(self, memory: _Buffer, element_size: int) -> Iterator[Callable[[], bytearray]]:
        """Yield one function for each frame of memory; the function returns the encoded frame."""
        view = memoryview(memory).cast("B")
        group_size = _GROUP_FRAMES * self.frame_size
        for group_start, group_end in frame_bounds(len(view), group_size):
            group = _FrameGroup(self, view[group_start:group_end], element_size)
            for start, end in frame_bounds(group_end - group_start, self.frame_size):
                yield partial(group.encode, start, end)

    def plain_frames(self, data: _Buffer) -> bytes:
        """Return uncompressed frames of data that is too small to compress."""
        view, compressor = memoryview(data), self.acquire_compressor()
        try:
            return b"".join(
                encode_frame(view[start:end], [Method.RAW], compressor)
                for start, end in frame_bounds(len(view), self.frame_size)
            )
        finally:
            self.release_compressor(compressor)

    def acquire_compressor(self) -> Compressor:
        """Return a compressor for one thread. After use, pass it to `release_compressor`."""
        try:
            return self._idle.pop()
        except IndexError:
            return Compressor(self._level)

    def release_compressor(self, compressor: Compressor) -> None:
        """Make a compressor available to the next `acquire_compressor`."""
        self._idle.append(compressor)


def _stop(pending: deque[Future[T]]) -> None:
    """Cancel calls, and wait for running calls, because they read the caller's memory."""
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


class _FrameGroup:
    """Consecutive frames of one memory that are encoded by the same methods."""

    def __init__(self, codec: Codec, memory: memoryview, element_size: int) -> None:
        self._codec = codec
        self._memory = memory
        self._element_size = element_size
        self._methods: tuple[Method, ...] = ()

    def encode(self, start: int, end: int) -> bytearray:
        """Return the frame of the bytes `[start, end)` of the group."""
        compressor = self._codec.acquire_compressor()
        try:
            # Two threads may plan at the same time; both get the same methods.
            methods = self._methods = self._methods or self._plan(compressor)
            return encode_frame(self._memory[start:end], methods, compressor)
        finally:
            self._codec.release_compressor(compressor)

    def _plan(self, compressor: Compressor) -> tuple[Method, ...]:
        element_size = self._element_size or plan_planes(self._memory, compressor)
        plane_size = self._codec.plane_size_of(element_size)
        if plane_size > 1 and len(self._memory) <= _MAX_UNSAMPLED_BYTES:
            return (Method.ENTROPY,) * plane_size
        return plan_methods(self._memory, plane_size, compressor)


class EncodedFrames:
    """One item as a stream of frames. `Codec.encode_items` may encode it once only.

    Args:
        codec: The codec.
        before: Bytes of the item before the tensor's memory.
        memory: Contiguous memory of the tensor; must not change before the last segment is yielded.
        after: Bytes of the item after the tensor's memory.
        element_size: Size of one element of the tensor in bytes.
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
        """Number of segments that `Codec.encode_items` yields for the item, at most."""
        return 2 + self._num_frames

    @property
    def _num_frames(self) -> int:
        return len(frame_bounds(len(self._memory), self._codec.frame_size))

    @property
    def length(self) -> int:
        """Size of all segments in bytes; known after the last segment was yielded."""
        frames = self._frame_ends[-1] if self._frame_ends else 0
        return len(self._begin) + frames + len(self._end)

    def stored(self, offset: int) -> StoredItem:
        """Return the description of the item, at `offset` of its object, for the commit.

        Raises:
            ValueError: Not all segments were yielded yet.
        """
        if len(self._frame_ends) != self._num_frames:
            raise ValueError(
                "the frame table of an item is known only after its last segment was yielded; "
                "iterate over encode_items to its end first"
            )
        return StoredItem(
            offset=offset,
            length=self.length,
            data_start=offset + len(self._begin),
            data_size=len(self._memory),
            frame_size=self._codec.frame_size,
            frame_ends=tuple(self._frame_ends),
            plane_size=self._codec.plane_size_of(self._element_size),
        )

    def encoders(self) -> Iterator[Callable[[], _EncodedFrame]]:
        """Yield one function for each frame; the function returns an `_EncodedFrame`."""
        last = self._num_frames - 1
        if last < 0:
            yield lambda: (self, self._begin, b"", self._end)
        encoders = self._codec.encoders(self._memory, self._element_size)
        for index, encode in enumerate(encoders):
            before = self._begin if index == 0 else b""
            yield partial(self._encode, before, encode, self._end if index == last else b"")

    def _encode(self, before: bytes, frame: Callable[[], bytearray], after: bytes) -> _EncodedFrame:
        return self, before, frame(), after

    def add_frame(self, frame: bytes | bytearray) -> None:
        """Add the size of the next frame to the table that `stored` returns."""
        if frame:
            end = self._frame_ends[-1] if self._frame_ends else 0
            self._frame_ends.append(end + len(frame))


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """The bytes that torch.save writes for one tensor or value."""

    segments: tuple[bytes | memoryview, ...]
    """Segments of the item in order. A tensor has three: the bytes before its data, its data, and
    the bytes after its data."""
    length: int
    """Size of the item in bytes."""
    data_start: int = 0
    """Offset of the tensor's data in the item; 0 if unknown, or if the item is a value."""
    data_size: int = 0
    """Size of the tensor's data in bytes; 0 if unknown."""
    element_size: int = 1
    """Size of one element in bytes."""


class Packer:
    """Sequence of the items of one data object, with the offset of each.

    Attributes:
        stored: The location of each item that was added, in order.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        """Start an empty data object; only `pack` needs the codec."""
        self.stored: list[StoredItem] = []
        self._codec = codec
        self._size = 0

    def add(self, item: EncodedItem) -> tuple[bytes | memoryview, ...]:
        """Add an item without compression; return its padding and its segments."""
        padding = self._pad()
        start = self._size + item.data_start if item.data_start else 0
        self._append(StoredItem(self._size, item.length, start, item.data_size))
        return padding, *item.segments

    async def pack(self, items: Sequence[EncodedItem]) -> AsyncGenerator[bytes | memoryview]:
        """Add items, compress the large tensors among them, and yield the bytes.

        While the caller uses the bytes of one item, threads of the codec compress the next items.
        """
        codec = self._codec
        assert codec is not None
        compressed_items = [
            codec.encode_item(*item.segments, element_size=item.element_size)
            if item.data_size >= _MIN_COMPRESSED_BYTES
            else None
            for item in items
        ]
        encoded = codec.encode_items(each for each in compressed_items if each is not None)
        async with aclosing(encoded) as segments:
            for item, compressed_item in zip(items, compressed_items, strict=True):
                if compressed_item is None:
                    for piece in self.add(item):
                        yield piece
                    continue
                yield self._pad()
                for _ in range(compressed_item.num_segments):
                    yield memoryview((await anext(segments))[1])
                self._append(compressed_item.stored(self._size))

    def _pad(self) -> bytes:
        padding = bytes(-self._size % ALIGNMENT_BYTES)
        self._size += len(padding)
        return padding

    def _append(self, stored: StoredItem) -> None:
        self.stored.append(stored)
        self._size = stored.offset + stored.length
