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
        AsyncIterator,
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
_Made: TypeAlias = "tuple[EncodedFrames, bytes, bytes | bytearray, bytes]"
"""An item, a frame of it, and what goes before and behind it: nothing but at both ends."""

_RUN_FRAMES = 64
"""Frames that are stored by one plan: what is in a tensor may change on the way through it."""

_DECODED_FRAMES = 4
"""Frames that one call decodes: 2 ms, beside which it costs little to hand it to a thread."""

_TRIED_BYTES = 64 * 1024
"""Samples of less are as much work as trying."""


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
            memory: Contiguous bytes; they stay as they are until the last segment was taken.
            after: What it has behind.
            element_size: Bytes of an element of the tensor.
        """
        return EncodedFrames(self, before, memory, after, element_size)

    def encode_items(
        self, items: Iterable[EncodedFrames]
    ) -> Generator[tuple[EncodedFrames, bytes | bytearray]]:
        """Yield the segments of items, one item behind the other; later ones are begun ahead."""
        for made in self.in_order(_calls_of(items)):
            yield from _segments(made)

    async def encode_items_on_loop(
        self, items: Iterable[EncodedFrames]
    ) -> AsyncGenerator[tuple[EncodedFrames, bytes | bytearray]]:
        """Yield the same to a coroutine, whose loop goes on meanwhile."""
        async with aclosing(self.in_order_on_loop(_calls_of(items))) as all_made:
            async for made in all_made:
                for segment in _segments(made):
                    yield segment

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
            partial(_decode, stored, begin, group, out, plane_size)
            for group in (
                slices[at : at + _DECODED_FRAMES] for at in range(0, len(slices), _DECODED_FRAMES)
            )
        )
        async with aclosing(self.in_order_on_loop(calls)) as decoded:
            async for _ in decoded:
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

    async def in_order_on_loop(self, calls: Iterable[Callable[[], T]]) -> AsyncGenerator[T]:
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

    def plain_frames(self, data: _Buffer) -> bytes:
        """Return frames of what is too small to be compressed."""
        view, compressor = memoryview(data), self.take_compressor()
        try:
            return b"".join(
                encode_frame(view[start:end], [Method.RAW], compressor)
                for start, end in frame_bounds(len(view), self.frame_size)
            )
        finally:
            self.give_back(compressor)

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


def _calls_of(items: Iterable[EncodedFrames]) -> Iterator[Callable[[], _Made]]:
    return chain.from_iterable(item.calls() for item in items)


def _segments(made: _Made) -> Iterator[tuple[EncodedFrames, bytes | bytearray]]:
    item, before, frame, after = made
    item.note(frame)
    return ((item, segment) for segment in (before, frame, after) if segment)


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
        element_size = self._element_size or plan_planes(self._memory, compressor)
        plane_size = self._codec.plane_size_of(element_size)
        if plane_size > 1 and len(self._memory) <= _TRIED_BYTES:
            return (Method.ENTROPY,) * plane_size
        return plan_methods(self._memory, plane_size, compressor)


class EncodedFrames:
    """One item as a stream of frames, whose segments are taken once: `Codec.encode_items`.

    Args:
        codec: What compresses it.
        before: What the item has before the tensor's memory.
        memory: Contiguous bytes; they stay as they are until the last segment was taken.
        after: What it has behind.
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

    def __iter__(self) -> Iterator[_Buffer]:
        return (segment for _, segment in self._codec.encode_items([self]))

    async def __aiter__(self) -> AsyncIterator[_Buffer]:
        async with aclosing(self._codec.encode_items_on_loop([self])) as segments:
            async for _, segment in segments:
                yield segment

    @property
    def num_segments(self) -> int:
        """How many segments it has."""
        return 2 + self._num_frames

    @property
    def _num_frames(self) -> int:
        return len(frame_bounds(len(self._memory), self._codec.frame_size))

    @property
    def length(self) -> int:
        """Bytes of the segments, once all were taken."""
        frames = self._frame_ends[-1] if self._frame_ends else 0
        return len(self._begin) + frames + len(self._end)

    def stored(self, offset: int) -> StoredItem:
        """Return where everything lies, once all segments were taken.

        Args:
            offset: Where the item begins in its object.

        Raises:
            ValueError: Not all of them were.
        """
        if len(self._frame_ends) != self._num_frames:
            raise ValueError("an item has a table when all of its segments were taken")
        return StoredItem(
            offset=offset,
            length=self.length,
            data_start=offset + len(self._begin),
            data_size=len(self._memory),
            frame_size=self._codec.frame_size,
            frame_ends=tuple(self._frame_ends),
            plane_size=self._codec.plane_size_of(self._element_size),
        )

    def calls(self) -> Iterator[Callable[[], _Made]]:
        """Yield what makes the segments, a frame each with what goes around it."""
        last = self._num_frames - 1
        if last < 0:
            yield lambda: (self, self._begin, b"", self._end)
        for index, call in enumerate(self._codec.calls(self._memory, self._element_size)):
            before = self._begin if index == 0 else b""
            yield partial(self._make, before, call, self._end if index == last else b"")

    def _make(self, before: bytes, call: Callable[[], bytearray], after: bytes) -> _Made:
        return self, before, call(), after

    def note(self, frame: bytes | bytearray) -> None:
        """Take note of the next frame."""
        if frame:
            end = self._frame_ends[-1] if self._frame_ends else 0
            self._frame_ends.append(end + len(frame))
