"""Bytes that are read twice: where the second copy differs from the first, and what it finds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ChecksumError, TransientError
from aioflux._transfer.twice import copy_pieces
from tests.transfer.scripted_service import ScriptedService, pattern

if TYPE_CHECKING:
    from aioflux._services.base import Body, ReadRequest

DATA = pattern(3500)
spans = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3)).filter(
    lambda span: span[0] != span[1]
)


@given(spans)
def test_each_byte_has_another_position_in_the_second_copy(span: tuple[int, int, int]) -> None:
    start, end, num_after = min(span[:2]), max(span[:2]), span[2]
    size = end + num_after
    pieces = copy_pieces(start, end, size, 1)
    assert [*range(start, end)] == [at for at in _bytes_of(pieces) if start <= at < end]
    assert all(0 <= first < last <= size for first, last in pieces)
    for at in range(max(start, 1), min(end, size - 1)):
        [(first, last)] = [piece for piece in pieces if piece[0] <= at < piece[1]]
        assert at - first != at - start
        assert last - at != end - at


def _bytes_of(pieces: list[tuple[int, int]]) -> list[int]:
    return [at for first, last in pieces for at in range(first, last)]


class Damage:
    """Damages each response of a service at one place, counted from its beginning or its end."""

    def __init__(self, scripted: ScriptedService, place: int) -> None:
        inner = scripted.service.get

        async def get(request: ReadRequest, **settings: Any) -> Body:
            settings["into"] = settings.get("into") or (lambda size: memoryview(bytearray(size)))
            body = await inner(request, **settings)
            view = memoryview(body.data)
            if -view.nbytes <= place < view.nbytes:
                view[place] ^= 1
            return body

        scripted.service.get = get  # type: ignore[method-assign]


@pytest.mark.parametrize("place", [0, 1, 2, 7, -1, -2, -3, -8])
@pytest.mark.parametrize(
    ("start", "end"), [(0, 3500), (0, 900), (100, 1000), (2700, 3500), (1, 3499), (2000, 9000)]
)
@pytest.mark.parametrize("is_known", [True, False], ids=["listed", "by name"])
async def test_a_place_that_is_wrong_in_each_response_is_found(
    scripted: ScriptedService, place: int, start: int, end: int, *, is_known: bool
) -> None:
    """Except the object's own first or last byte, which has the same position in each response."""
    meta = scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True, range_size_bytes=4000)
    Damage(scripted, place)
    try:
        got = await store.get_range(meta if is_known else "a", start=start, end=end)
    except (ChecksumError, TransientError):
        return
    wrong = [at for at, byte in enumerate(got, start) if byte != DATA[at]]
    assert wrong in ([], [0], [3499])
    assert not wrong or place in {0, -1}


async def test_a_reader_reads_each_range_twice(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True)
    async with store.open_reader(meta, read_ahead_bytes=2000) as reader:
        assert await reader.read() == DATA
    assert scripted.service.count("get") >= 8


async def test_bytes_that_a_checksum_covers_are_read_once(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA[:900])
    store = scripted.new_store(verify_ranges=True)
    async with store.open_reader(meta) as reader:
        assert await reader.read() == DATA[:900]
    assert await store.get(meta) == await store.get("a") == DATA[:900]
    [batch] = [batch async for batch in store.fetch_batches([meta])]
    assert [data for _, data in batch] == [DATA[:900]]
    assert scripted.service.count("get") == 4


async def test_both_requests_are_within_the_limit(scripted: ScriptedService) -> None:
    meta = scripted.put("a", pattern(60_000))
    store = scripted.new_store(verify_ranges=True, max_in_flight=4)
    inner, now, most = scripted.service.get, 0, 0

    async def get(request: ReadRequest, **settings: Any) -> Body:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return await inner(request, **settings)

    scripted.service.get = get  # type: ignore[method-assign]
    await store.get_range(meta, start=1, end=59_000)
    assert 2 < most <= 4


@pytest.mark.parametrize("operation", ["get", "get_into"])
@pytest.mark.parametrize("has_checksum", [True, False])
async def test_an_object_that_is_replaced_between_two_copies_is_read_anew(
    scripted: ScriptedService, operation: str, *, has_checksum: bool
) -> None:
    changed, buffer = pattern(3500, seed=9), bytearray(900)
    scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True, range_size_bytes=4000)
    inner, num_gets = scripted.service.get, 0

    async def get(request: ReadRequest, **settings: Any) -> Body:
        nonlocal num_gets
        body = await inner(request, **settings)
        if num_gets == 0:
            scripted.put("a", changed)
        num_gets += 1
        return body if has_checksum else replace(body, crc32c=None)

    scripted.service.get = get  # type: ignore[method-assign]
    if operation == "get_into":
        await store.get_into("a", buffer)
        assert buffer == changed[:900]
    else:
        assert await store.get("a") == (DATA if has_checksum else changed)
