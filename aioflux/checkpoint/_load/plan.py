"""Read plans of a load: the requests that read the needed ranges of objects. Pure.

    part of a stored tensor            -> boxes: each is contiguous bytes, or rows with small gaps
    ranges of all boxes in one object  -> reads: straight into the target's memory, or into a
                                          buffer, from which each box is copied

A stored tensor is contiguous. A slice of its rows is contiguous, too, but a slice of its columns
has gaps between its pieces. Gaps that cost less than another request are read and thrown away: gaps
up to `MAX_GAP_BYTES`, or up to 4 % of the needed bytes before them. Reads begin and end at the
bounds of blocks, because only whole blocks can be verified. A block that two boxes share is read
once if one read can include both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

MAX_GAP_BYTES: Final = 16 * 1024
"""Gaps up to this size are read: that takes 0.16 ms at 100 MB/s, less than a request."""

MAX_READ_BYTES: Final = 16 * 1024 * 1024
"""Size of one buffer, and approximate limit of one request."""

_MIN_DIRECT_BYTES: Final = 256 * 1024
"""Smaller ranges are read into a buffer with their neighbours, and copied."""

_NEEDED_PER_GAP_BYTE: Final = 25
"""Larger gaps are read if there are this many needed bytes for each byte of the gap."""


class Box(NamedTuple):
    """A part of a stored tensor, and its bytes in the object."""

    offsets: tuple[int, ...]
    """Position of the first element, relative to the part that is loaded."""
    lengths: tuple[int, ...]
    """Size in each dimension, at least 1."""
    start: int
    """First byte in the object."""
    end: int
    """One past the last byte in the object. The range includes the gaps between rows."""


class Needed(Protocol):
    """A range of an object that a copy needs."""

    @property
    def start(self) -> int:
        """First byte in the object."""

    @property
    def end(self) -> int:
        """One past the last byte in the object."""

    @property
    def is_direct(self) -> bool:
        """Return whether the bytes are contiguous in the target's memory.

        Only such a range can be split; another one must be read into one buffer.
        """


N = TypeVar("N", bound=Needed)


class Part(NamedTuple, Generic[N]):
    """Bytes `[start, end)` of an object that belong to the range of a copy."""

    copy: N
    start: int
    end: int


class Read(NamedTuple, Generic[N]):
    """One request for the bytes `[start, end)` of an object."""

    start: int
    end: int
    parts: tuple[Part[N], ...]

    @property
    def is_direct(self) -> bool:
        """Return whether the bytes are read straight into the memory of the only part's target.

        Otherwise they are read into a buffer.
        """
        first = self.parts[0]
        is_exact = len(self.parts) == 1 and self[:2] == first[1:]
        return is_exact and first.copy.is_direct


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides, step = list[int](), 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def plan_boxes(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    item_size: int,
    data_start: int,
    max_gap_bytes: int = MAX_GAP_BYTES,
) -> Iterator[Box]:
    """Yield the boxes of a part of a contiguous tensor, in the order of their bytes.

    Args:
        sizes: Sizes of the tensor.
        offsets: Position of the part's first element in the tensor.
        lengths: Sizes of the part.
        item_size: Bytes of an element.
        data_start: First byte of the tensor in the object.
        max_gap_bytes: The largest gap within a box.
    """
    if 0 in lengths:
        return
    strides = dense_strides(sizes)
    first = sum(i * step for i, step in zip(offsets, strides, strict=True))
    start = data_start + item_size * first
    # Gaps are larger in outer dimensions. Each index in the dimensions before `depth` has
    # a box of its own.
    depth = 0
    while depth < len(sizes) and (
        lengths[depth] == 1
        or item_size * (strides[depth] - _span(lengths[depth + 1 :], strides[depth + 1 :]))
        > max_gap_bytes
    ):
        depth += 1
    inner = (0,) * (len(sizes) - depth)
    box_lengths = (*((1,) * depth), *lengths[depth:])
    size = item_size * _span(lengths[depth:], strides[depth:])
    for index in _indices(lengths[:depth]):
        begin = start + item_size * sum(i * step for i, step in zip(index, strides, strict=False))
        yield Box((*index, *inner), box_lengths, begin, begin + size)


def cut_box(
    box: Box, sizes: Sequence[int], *, item_size: int, max_span_bytes: int = MAX_READ_BYTES
) -> Iterator[Box]:
    """Split a box into boxes of at most `max_span_bytes`."""
    strides = dense_strides(sizes)
    axis = next((i for i, length in enumerate(box.lengths) if length > 1), None)
    if axis is None or box.end - box.start <= max_span_bytes:
        yield box
        return
    inner_bytes = item_size * _span(box.lengths[axis + 1 :], strides[axis + 1 :])
    step_bytes = item_size * strides[axis]
    num_rows = max(1, 1 + (max_span_bytes - inner_bytes) // step_bytes)
    for first in range(0, box.lengths[axis], num_rows):
        rows = min(num_rows, box.lengths[axis] - first)
        start = box.start + first * step_bytes
        offsets = (*box.offsets[:axis], box.offsets[axis] + first, *box.offsets[axis + 1 :])
        lengths = (*box.lengths[:axis], rows, *box.lengths[axis + 1 :])
        piece = Box(offsets, lengths, start, start + (rows - 1) * step_bytes + inner_bytes)
        yield from cut_box(piece, sizes, item_size=item_size, max_span_bytes=max_span_bytes)


def _span(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a box, including gaps."""
    return 1 + sum((n - 1) * step for n, step in zip(lengths, strides, strict=True))


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for number in range(math.prod(lengths)):
        index, rest = list[int](), number
        for length in reversed(lengths):
            rest, i = divmod(rest, length)
            index.append(i)
        yield tuple(reversed(index))


def plan_reads(
    copies: Sequence[N],
    *,
    size: int,
    block_size: int = 1,
    max_gap_bytes: int = MAX_GAP_BYTES,
    max_read_bytes: int = MAX_READ_BYTES,
) -> list[Read[N]]:
    """Return the reads of all needed ranges of one object, in the order of their bytes.

    Args:
        copies: The copies, each with the range that it needs; ranges may overlap.
        size: Size of the object in bytes.
        block_size: Reads begin and end at multiples of this, or at the end of the object.
        max_gap_bytes: Gaps up to this size are read, if the read stays within `max_read_bytes`.
        max_read_bytes: The largest read in bytes. A single block, and a range that must be read
            into one buffer, may exceed it.
    """
    reads, parts = list[Read[N]](), list[Part[N]]()
    for copy in copies:
        # The whole blocks of the range are read directly, the rest at both ends into buffers.
        first = -(-copy.start // block_size) * block_size
        last = copy.end if copy.end == size else copy.end // block_size * block_size
        if not copy.is_direct or last - first < _MIN_DIRECT_BYTES:
            parts.append(Part(copy, copy.start, copy.end))
            continue
        step = max(1, max_read_bytes // block_size) * block_size
        for start in range(first, last, step):
            end = min(start + step, last)
            reads.append(Read(start, end, (Part(copy, start, end),)))
        for start, end in ((copy.start, first), (last, copy.end)):
            if start < end:
                parts.append(Part(copy, start, end))
    parts.sort(key=itemgetter(1, 2))
    reads += _group(parts, size, block_size, max_gap_bytes, max_read_bytes)
    return sorted(reads, key=itemgetter(0, 1))


def _group(
    parts: Sequence[Part[N]], size: int, block_size: int, max_gap_bytes: int, max_read_bytes: int
) -> Iterator[Read[N]]:
    """Yield one read for each group of parts that are near each other."""
    group, start, end, num_needed = list[Part[N]](), 0, 0, 0
    for part in parts:
        first = part.start // block_size * block_size
        last = min(size, -(-part.end // block_size) * block_size)
        gap = first - end
        is_near = gap <= max_gap_bytes or gap * _NEEDED_PER_GAP_BYTE <= num_needed
        if group and is_near and max(end, last) - start <= max_read_bytes:
            num_needed += max(0, last - max(end, first))
            end = max(end, last)
        else:
            if group:
                yield Read(start, end, tuple(group))
            group, start, end, num_needed = [], first, last, last - first
        group.append(part)
    if group:
        yield Read(start, end, tuple(group))
