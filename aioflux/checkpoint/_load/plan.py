"""The plan of the reads of a load: ranges of objects, and their copies into memory. Pure.

    part of a stored tensor            -> boxes: each one run of bytes, or runs with small gaps
    ranges of all boxes in one object  -> reads: straight into the target's memory, or into a
                                          buffer, from which each box is copied

A stored tensor is contiguous, so that rows of its first dimension are one run, and a box that is
narrower in an inner dimension is many runs with gaps. A gap is read, too, if that costs less than
another request: up to `MAX_GAP_BYTES`, or up to 4 % of the needed bytes. Reads begin and end at
blocks, which are verified whole; a block that two boxes share is read once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MAX_GAP_BYTES",
    "MAX_READ_BYTES",
    "Box",
    "NeededRange",
    "PlannedRead",
    "ReadPart",
    "cut_box",
    "dense_strides",
    "plan_boxes",
    "plan_reads",
]

MAX_GAP_BYTES: Final = 16 * 1024
"""Smaller gaps are always read: a fifth of a millisecond at 100 MB/s, less than a request."""

MAX_READ_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one request, about, and of one buffer."""

_MIN_DIRECT_BYTES: Final = 256 * 1024
"""Smaller ranges are read together with their neighbours, and copied."""

_GAP_SHARE: Final = 25
"""Needed bytes for each byte of larger gaps, at least."""


class Box(NamedTuple):
    """A part of a stored tensor, and the bytes of the object that hold it."""

    offsets: tuple[int, ...]
    """Its first element, counted from that of the needed part."""
    lengths: tuple[int, ...]
    """Its size in each dimension, at least 1."""
    start: int
    """First byte in the object."""
    end: int
    """One past its last byte; gaps between its rows are included."""


class NeededRange(NamedTuple):
    """Bytes `[start, end)` of an object that are needed."""

    start: int
    end: int
    is_direct: bool
    """Copied without change to contiguous memory; otherwise needed in one buffer."""


class ReadPart(NamedTuple):
    """Bytes `[start, end)` of an object that belong to a needed range."""

    range_index: int
    """Index of the range in the arguments of `plan_reads`."""
    start: int
    end: int


class PlannedRead(NamedTuple):
    """One request for the bytes `[start, end)` of an object."""

    start: int
    end: int
    is_direct: bool
    """Straight into the memory of its only part; otherwise into a buffer."""
    parts: tuple[ReadPart, ...]


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

    The part begins at element `offsets` and has `lengths`; the tensor at byte `data_start` of the
    object. Gaps within a box are at most `max_gap_bytes`.
    """
    if 0 in lengths:
        return
    strides = dense_strides(sizes)
    first = sum(at * step for at, step in zip(offsets, strides, strict=True))
    start = data_start + item_size * first
    # Gaps grow towards the outer dimensions: those before `depth` are walked index by index.
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
        at = start + item_size * sum(i * step for i, step in zip(index, strides, strict=False))
        yield Box((*index, *inner), box_lengths, at, at + size)


def cut_box(
    box: Box, sizes: Sequence[int], *, item_size: int, max_span_bytes: int = MAX_READ_BYTES
) -> Iterator[Box]:
    """Yield a box in slices of at most `max_span_bytes`, as far as there is a dimension to cut."""
    strides = dense_strides(sizes)
    axis = next((at for at, length in enumerate(box.lengths) if length > 1), None)
    if axis is None or box.end - box.start <= max_span_bytes:
        yield box
        return
    inner_bytes = item_size * _span(box.lengths[axis + 1 :], strides[axis + 1 :])
    step_bytes = item_size * strides[axis]
    num_rows = max(1, 1 + (max_span_bytes - inner_bytes) // step_bytes)
    for at in range(0, box.lengths[axis], num_rows):
        rows = min(num_rows, box.lengths[axis] - at)
        start = box.start + at * step_bytes
        offsets = (*box.offsets[:axis], box.offsets[axis] + at, *box.offsets[axis + 1 :])
        lengths = (*box.lengths[:axis], rows, *box.lengths[axis + 1 :])
        piece = Box(offsets, lengths, start, start + (rows - 1) * step_bytes + inner_bytes)
        yield from cut_box(piece, sizes, item_size=item_size, max_span_bytes=max_span_bytes)


def _span(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a box, gaps included."""
    return 1 + sum((n - 1) * step for n, step in zip(lengths, strides, strict=True))


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for number in range(math.prod(lengths)):
        index, rest = list[int](), number
        for length in reversed(lengths):
            rest, at = divmod(rest, length)
            index.append(at)
        yield tuple(reversed(index))


def plan_reads(
    needed: Sequence[NeededRange],
    *,
    size: int,
    block_size: int = 1,
    max_gap_bytes: int = MAX_GAP_BYTES,
    max_read_bytes: int = MAX_READ_BYTES,
) -> list[PlannedRead]:
    """Return the reads of all needed ranges of one object, in the order of their bytes.

    Args:
        needed: The ranges; they may overlap.
        size: Size of the object in bytes.
        block_size: Reads begin and end at multiples of this, or at the end of the object.
        max_gap_bytes: The largest gap that is always read.
        max_read_bytes: Bytes of one read, at most, unless one range needs more.
    """
    directs, parts = list[PlannedRead](), list[ReadPart]()
    for number, each in enumerate(needed):
        inner = -(-each.start // block_size) * block_size
        outer = each.end if each.end == size else each.end // block_size * block_size
        if not each.is_direct or outer - inner < _MIN_DIRECT_BYTES:
            parts.append(ReadPart(number, each.start, each.end))
            continue
        step = max(1, max_read_bytes // block_size) * block_size
        for at in range(inner, outer, step):
            end = min(at + step, outer)
            directs.append(PlannedRead(at, end, True, (ReadPart(number, at, end),)))
        for start, end in ((each.start, inner), (outer, each.end)):
            if start < end:
                parts.append(ReadPart(number, start, end))
    parts.sort(key=lambda part: (part.start, part.end))
    groups = _group(parts, size, block_size, max_gap_bytes, max_read_bytes)
    return sorted([*directs, *(_as_direct(read, needed) for read in groups)])


def _group(
    parts: Sequence[ReadPart], size: int, block_size: int, max_gap_bytes: int, max_read_bytes: int
) -> Iterator[PlannedRead]:
    """Yield reads into buffers of parts that are near each other."""
    group, start, end, num_needed = list[ReadPart](), 0, 0, 0
    for part in parts:
        first = part.start // block_size * block_size
        last = min(size, -(-part.end // block_size) * block_size)
        gap = first - end
        is_near = gap <= max_gap_bytes or gap * _GAP_SHARE <= num_needed
        if group and is_near and max(end, last) - start <= max_read_bytes:
            num_needed += max(0, last - max(end, first))
            end = max(end, last)
        else:
            if group:
                yield PlannedRead(start, end, False, tuple(group))
            group, start, end, num_needed = [], first, last, last - first
        group.append(part)
    if group:
        yield PlannedRead(start, end, False, tuple(group))


def _as_direct(read: PlannedRead, needed: Sequence[NeededRange]) -> PlannedRead:
    only = read.parts[0]
    is_exact = len(read.parts) == 1 and read[:2] == only[1:]
    return read._replace(is_direct=is_exact and needed[only.range_index].is_direct)
