"""Any part of any stored tensor is read by exact ranges: as narrow() of the whole would be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.checkpoint._format.tensor_zip import is_dense
from aioflux.checkpoint._load.plan import (
    Box,
    Read,
    cut_box,
    dense_strides,
    plan_boxes,
    plan_reads,
)

MIB = 1024 * 1024


@dataclass(frozen=True, eq=False)
class Range:
    """A copy, of which a plan knows only the range."""

    start: int
    end: int
    is_direct: bool


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [draw(st.integers(0, size - at)) for size, at in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


def narrow(tensor: torch.Tensor, offsets: list[int], lengths: list[int]) -> torch.Tensor:
    for axis, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, at, length)
    return tensor


def execute(data: bytes, reads: list[Read[Range]], ranges: list[Range]) -> list[bytes]:
    """Return the bytes of each range, as an executor of the plan would read them."""
    found = {each: bytearray(b"?" * (each.end - each.start)) for each in ranges}
    missing = {each: [1] * (each.end - each.start) for each in ranges}
    for read in reads:
        buffer = data[read.start : read.end]
        assert len(buffer) == read.end - read.start
        if read.is_direct:
            (part,) = read.parts
            assert (part.start, part.end) == (read.start, read.end)
            assert part.copy.is_direct
        for copy, start, end in read.parts:
            span = slice(start - copy.start, end - copy.start)
            found[copy][span] = buffer[start - read.start : end - read.start]
            missing[copy][span] = [each - 1 for each in missing[copy][span]]
            if not copy.is_direct:
                assert (start, end) == (copy.start, copy.end)
    assert all(count == 0 for counts in missing.values() for count in counts)  # each byte once
    return [bytes(found[each]) for each in ranges]


@settings(max_examples=150)
@given(
    selection=selections(),
    item_size=st.sampled_from([1, 2, 8]),
    data_start=st.integers(0, 100),
    max_gap=st.integers(0, 40),
    max_span=st.integers(1, 60),
    block_size=st.sampled_from([1, 4, 16, 64]),
)
def test_boxes_and_reads_return_the_bytes_of_narrow(
    selection: tuple[list[int], list[int], list[int]],
    item_size: int,
    data_start: int,
    max_gap: int,
    max_span: int,
    block_size: int,
) -> None:
    sizes, offsets, lengths = selection
    stored = torch.randint(0, 255, (math.prod(sizes), item_size), dtype=torch.uint8)
    data = bytes(range(data_start)) + stored.numpy().tobytes() + b"end"
    boxes = [
        box
        for whole in plan_boxes(
            sizes,
            offsets,
            lengths,
            item_size=item_size,
            data_start=data_start,
            max_gap_bytes=max_gap,
        )
        for box in cut_box(whole, sizes, item_size=item_size, max_span_bytes=max_span)
    ]
    ranges = [Range(box.start, box.end, is_run(box, item_size)) for box in boxes]
    reads = plan_reads(ranges, size=len(data), block_size=block_size, max_gap_bytes=max_gap)
    for read in reads:
        assert read.start % block_size == 0
        assert read.end % block_size == 0 or read.end == len(data)
    wanted = narrow(stored.reshape(*sizes, item_size), [*offsets, 0], [*lengths, item_size])
    made = torch.full(wanted.shape, 77, dtype=torch.uint8)
    steps = (*(item_size * step for step in dense_strides(sizes)), 1)
    for box, part in zip(boxes, execute(data, reads, ranges), strict=True):
        view = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        view = view.as_strided((*box.lengths, item_size), steps)
        narrow(made, [*box.offsets, 0], [*box.lengths, item_size]).copy_(view)
    assert torch.equal(made, wanted)


def is_run(box: Box, item_size: int) -> bool:
    return math.prod(box.lengths) * item_size == box.end - box.start


@settings(max_examples=150)
@given(
    spans=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300), st.booleans()), max_size=12),
    block_size=st.sampled_from([1, 7, 64]),
    max_gap=st.integers(0, 100),
    max_read=st.integers(1, 400),
)
def test_reads_cover_all_needed_ranges(
    spans: list[tuple[int, int, bool]], block_size: int, max_gap: int, max_read: int
) -> None:
    data = bytes(at % 251 for at in range(1200))
    ranges = [Range(at, at + size, direct) for at, size, direct in spans]
    reads = plan_reads(
        ranges,
        size=len(data),
        block_size=block_size,
        max_gap_bytes=max_gap,
        max_read_bytes=max_read,
    )
    for each, found in zip(ranges, execute(data, reads, ranges), strict=True):
        assert found == data[each.start : each.end]


def test_rows_are_one_run_and_columns_far_apart_one_each() -> None:
    def box(offsets: tuple[int, int], lengths: tuple[int, int]) -> list[Box]:
        return list(plan_boxes((4, 100_000), offsets, lengths, item_size=4, data_start=704))

    assert box((1, 0), (2, 100_000)) == [Box((0, 0), (2, 100_000), 400_704, 1_200_704)]
    assert [each.start for each in box((1, 5), (3, 10))] == [400_724, 800_724, 1_200_724]


def test_columns_near_each_other_are_read_with_their_gaps() -> None:
    boxes = list(plan_boxes((512, 1024), (0, 0), (512, 341), item_size=4, data_start=0))
    assert boxes == [Box((0, 0), (512, 341), 0, 511 * 4096 + 4 * 341)]


def test_large_pieces_go_straight_to_memory_and_share_blocks_at_their_ends() -> None:
    cut = 3 * MIB + 700
    ranges = [Range(1000, cut, True), Range(cut, 8 * MIB, True)]
    reads = plan_reads(ranges, size=9 * MIB, block_size=65_536)
    assert [(read.start, read.end, read.is_direct) for read in reads] == [
        (0, 65_536, False),
        (65_536, 3 * MIB, True),
        (3 * MIB, 3 * MIB + 65_536, False),
        (3 * MIB + 65_536, 8 * MIB, True),
    ]
    assert [part.copy for part in reads[2].parts] == ranges


def test_a_large_range_is_read_in_parallel() -> None:
    reads = plan_reads([Range(10, 50 * MIB, True)], size=50 * MIB, max_read_bytes=16 * MIB)
    assert [read.end - read.start for read in reads] == [16 * MIB] * 3 + [2 * MIB - 10]
    assert all(read.is_direct for read in reads)


def test_many_small_neighbours_are_one_read() -> None:
    ranges = [Range(at * 17_000 + 704, at * 17_000 + 704 + 16_000, True) for at in range(200)]
    (read,) = plan_reads(ranges, size=200 * 17_000)
    assert len(read.parts) == 200


@pytest.mark.parametrize("block_size", [1, 65_536])
def test_a_third_of_large_rows_costs_at_most_a_twentieth_more(block_size: int) -> None:
    size, ranges = 64 * MIB, []
    for item in range(8):
        start = item * 8 * MIB + 704
        ranges.append(Range(start, start + 8 * MIB // 3, True))
    reads = plan_reads(ranges, size=size, block_size=block_size)
    needed = sum(each.end - each.start for each in ranges)
    assert sum(read.end - read.start for read in reads) <= 1.05 * needed


@given(selections())
def test_dense_is_contiguous_in_torch(
    selection: tuple[list[int], list[int], list[int]],
) -> None:
    sizes, offsets, lengths = selection
    part = narrow(torch.zeros(sizes), offsets, lengths)
    if part.numel():
        assert is_dense(lengths, dense_strides(sizes)) == part.is_contiguous()
