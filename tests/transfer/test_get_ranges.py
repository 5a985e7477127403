"""Several ranges of one object: few requests, one generation, and the bytes of each range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ChecksumError, NotFoundError, PreconditionFailedError
from aioflux._transfer.read_plan import coalesce_ranges
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import pattern

if TYPE_CHECKING:
    from aioflux._services.base import ReadRequest
    from tests.transfer.scripted_service import ScriptedService

DATA = pattern(9000)

a_range = st.tuples(st.integers(0, 500), st.integers(1, 200)).map(lambda p: (p[0], p[0] + p[1]))


@given(ranges=st.lists(a_range, max_size=30), gap=st.integers(0, 100), most=st.integers(1, 400))
def test_a_plan_covers_each_range_once(ranges: list[tuple[int, int]], gap: int, most: int) -> None:
    plan = coalesce_ranges(ranges, max_gap_bytes=gap, max_merged_bytes=most)
    members = [index for merged in plan for index in merged.members]
    assert sorted(members) == list(range(len(ranges)))
    for merged in plan:
        asked = [ranges[index] for index in merged.members]
        assert merged.start == min(start for start, _ in asked)
        assert merged.end == max(end for _, end in asked)
        # No byte is read that is further than a gap from what was asked for.
        reached = merged.start
        for start, end in asked:
            assert start - reached <= gap
            reached = max(reached, end)
        assert merged.end - merged.start <= max(most, max(end - start for start, end in asked))
    assert [merged.start for merged in plan] == sorted(merged.start for merged in plan)


@pytest.mark.parametrize(
    ("ranges", "gap", "expected"),
    [
        ([], 0, []),
        ([(0, 10), (10, 20)], 0, [(0, 20)]),
        ([(0, 10), (11, 20)], 0, [(0, 10), (11, 20)]),
        ([(30, 40), (0, 10)], 20, [(0, 40)]),
        ([(0, 60), (60, 120)], 20, [(0, 60), (60, 120)]),
        ([(0, 500), (100, 200), (450, 510)], 20, [(0, 500), (450, 510)]),
    ],
)
def test_what_is_merged(
    ranges: list[tuple[int, int]], gap: int, expected: list[tuple[int, int]]
) -> None:
    plan = coalesce_ranges(ranges, max_gap_bytes=gap, max_merged_bytes=100)
    assert [(each.start, each.end) for each in plan] == expected


def count_gets(scripted: ScriptedService) -> list[tuple[int, int]]:
    """Return a list that takes the ranges of the requests to come."""
    asked: list[tuple[int, int]] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: object) -> object:
        asked.append((request.start, request.end))
        return await inner(request, **settings)

    scripted.service.get = get
    return asked


async def test_near_ranges_are_one_request(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    asked = count_gets(scripted)
    found = await scripted.store.get_ranges("a", [(500, 600), (0, 10), (8, 20)], max_gap_bytes=600)
    assert found == [DATA[500:600], DATA[:10], DATA[8:20]]
    assert asked == [(0, 600)]
    assert scripted.is_clean()


async def test_ranges_far_apart_are_read_at_once_and_pinned(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    ranges = [(8000, 9500), (0, 10), (4000, 4010)]
    found = await scripted.store.get_ranges("a", ranges, max_gap_bytes=100)
    assert found == [DATA[start:end] for start, end in ranges]
    assert scripted.is_clean()


async def test_a_range_that_is_not_merged_is_not_copied(scripted: ScriptedService) -> None:
    """What the request brought is what is returned, for duplicates, too."""
    scripted.put("a", DATA)
    first, second = await scripted.store.get_ranges("a", [(0, 900), (0, 900)], max_gap_bytes=0)
    assert first is second


async def test_a_read_by_name_begins_again_where_the_object_is_replaced(
    scripted: ScriptedService,
) -> None:
    """No result has bytes of two generations."""
    scripted.put("a", DATA)
    other = pattern(9000, seed=2)
    inner = scripted.service.get
    num_calls = 0

    async def get(request: ReadRequest, **settings: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            scripted.put("a", other)
        return await inner(request, **settings)

    scripted.service.get = get
    ranges = [(0, 10), (4000, 4010), (8000, 8010)]
    found = await scripted.store.get_ranges("a", ranges, max_gap_bytes=0)
    assert found == [other[start:end] for start, end in ranges]


async def test_an_object_that_is_replaced_each_time_is_an_error(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: object) -> object:
        scripted.put("a", DATA)
        return await inner(request, **settings)

    scripted.service.get = get
    with pytest.raises(PreconditionFailedError, match="replaced while it was read"):
        await scripted.store.get_ranges("a", [(0, 1), (5000, 5001)], max_gap_bytes=0)


async def test_a_pinned_read_does_not_begin_again(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    scripted.put("a", DATA)
    for ranges in ([(0, 1)], [(0, 1), (5000, 5001)]):
        with pytest.raises(NotFoundError):
            await scripted.store.get_ranges(meta, ranges, max_gap_bytes=0)


async def test_flipped_bits_of_a_range_are_seen(scripted: ScriptedService) -> None:
    """As of `get_range`: ranges over an unguarded transport are read twice."""
    scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True)
    ranges = [(0, 900), (5000, 5900)]
    scripted.service.fail("get", Fault(kind="flip", num_bytes=2))
    found = await store.get_ranges("a", ranges, max_gap_bytes=0)
    assert found == [DATA[start:end] for start, end in ranges]
    scripted.service.fail("get", *(Fault(kind="flip", num_bytes=at) for at in range(1, 20)))
    with pytest.raises(ChecksumError):
        await store.get_ranges("a", ranges, max_gap_bytes=0)
