"""Bytes that are read twice: where the second copy differs from the first, and what it finds."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioflux import ChecksumError, TransientError
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import ScriptedService, pattern

if TYPE_CHECKING:
    from aioflux._services.base import Body, ReadRequest

DATA = pattern(3500)
SPANS = st.one_of(
    st.tuples(st.integers(0, 3480), st.integers(1, 9000)),
    # At the edges of the object few bytes are before or after a range.
    st.tuples(st.integers(0, 5), st.integers(1, 8)),
    st.tuples(st.integers(3488, 3499), st.integers(1, 12)),
)


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


@given(
    place=st.integers(-8, 8),
    span=SPANS,
    is_listed=st.booleans(),
)
@example(place=1, span=(0, 2), is_listed=True)
@example(place=0, span=(0, 3500), is_listed=True)
@example(place=-1, span=(0, 900), is_listed=True)
@example(place=1, span=(1, 3498), is_listed=False)
@example(place=-2, span=(2700, 800), is_listed=False)
def test_a_place_that_is_wrong_in_each_response_is_found(
    place: int, span: tuple[int, int], *, is_listed: bool
) -> None:
    """Except the own first or last byte of the object, which has one position in each response."""

    async def run() -> None:
        scripted = ScriptedService(f"twice-{uuid.uuid4().hex}")
        meta = scripted.put("a", DATA)
        store = scripted.new_store(verify_ranges=True, range_size_bytes=4000)
        Damage(scripted, place)
        start, length = span
        try:
            got = await store.get_range(meta if is_listed else "a", start=start, end=start + length)
        except (ChecksumError, TransientError):
            return
        wrong = [at for at, byte in enumerate(got, start) if byte != DATA[at]]
        assert wrong in ([], [0], [3499])
        assert not wrong or place in {0, -1}

    asyncio.run(run())


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


@pytest.mark.parametrize("max_in_flight", [1, 4])
async def test_all_copies_are_within_the_limit(
    scripted: ScriptedService, max_in_flight: int
) -> None:
    meta = scripted.put("a", pattern(60_000))
    store = scripted.new_store(verify_ranges=True, max_in_flight=max_in_flight)
    inner, now, most = scripted.service.get, 0, 0

    async def get(request: ReadRequest, **settings: Any) -> Body:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return await inner(request, **settings)

    scripted.service.get = get  # type: ignore[method-assign]
    await asyncio.gather(
        store.get_range(meta, start=0, end=59_000), store.get_range("a", start=1, end=60_000)
    )
    assert most == max_in_flight


async def test_each_copy_is_a_request_for_the_rate_and_the_counters(
    scripted: ScriptedService,
) -> None:
    meta = scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True, max_requests_per_second=1000)
    loop = asyncio.get_running_loop()
    started_at, before = loop.time(), store.stats
    for _ in range(60):
        await store.get_range(meta, start=100, end=200)
    assert loop.time() - started_at >= 0.015  # 120 requests, of which 100 may be sent at once
    assert store.stats.num_requests - before.num_requests == scripted.service.count("get") == 120
    assert store.stats.bytes_received - before.bytes_received == 60 * (100 + 102)


async def test_a_read_continues_where_a_response_broke_off(scripted: ScriptedService) -> None:
    """A copy has the bytes; it is as long as the response that broke off."""
    meta = scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True, range_size_bytes=4000, max_in_flight=1)
    inner = scripted.service.get
    starts: list[int] = []

    async def get(request: ReadRequest, **settings: Any) -> Body:
        starts.append(request.start)
        assert request.end is not None
        if request.end - request.start > 700:
            scripted.service.fail("get", Fault(kind="cut", num_bytes=700))
        return await inner(request, **settings)

    scripted.service.get = get  # type: ignore[method-assign]
    view = bytearray(2500)
    assert await store.get_into(meta, view, start=50) == 2500
    assert view == DATA[50:2550]
    assert starts[:4] == [50, 49, 748, 747]


async def test_bytes_of_a_response_that_broke_off_are_not_kept_without_a_copy(
    scripted: ScriptedService,
) -> None:
    meta = scripted.put("a", DATA)
    store = scripted.new_store(verify_ranges=True, range_size_bytes=4000, max_in_flight=1)
    scripted.service.fail("get", Fault(kind="cut", num_bytes=700), Fault(kind="refuse"))
    view = bytearray(2500)
    assert await store.get_into(meta, view, start=50) == 2500
    assert view == DATA[50:2550]
    assert scripted.service.count("get") == 4


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
