"""Reading objects: plans, broken bodies, wrong bytes and changed objects."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux import (
    ChecksumError,
    NotFoundError,
    ObjectMeta,
    PreconditionFailedError,
    RetryPolicy,
    StorageError,
    TransientError,
)
from aioflux._services.base import Body, ReadRequest, WriteRequest
from aioflux.testing.faults import Fault, FlakyService
from tests.servers.process_state import memory_bucket
from tests.transfer.scripted_service import (
    MIB,
    OPTIONS,
    REFUSE,
    ScriptedService,
    pattern,
    service_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aioflux
    from tests.transfer.clock import Clock

DATA = pattern(3500)  # four ranges


def requested(scripted: ScriptedService) -> list[tuple[int, int]]:
    """Return a list that takes the ranges of the requests to come."""
    asked: list[tuple[int, int]] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: object) -> object:
        asked.append((request.start, request.end))
        return await inner(request, **settings)

    scripted.service.get = get
    return asked


@settings(max_examples=30)
@given(st.integers(0, 10**4), st.integers(1, 10**4), st.integers(1, 10**4))
def test_a_plan_covers_every_byte_once(start: int, size: int, step: int) -> None:
    step = max(step, size // 50 + 1)

    async def run() -> None:
        scripted = ScriptedService("ranges")
        meta = scripted.put("a", pattern(20_000))
        asked = requested(scripted)
        store = scripted.new_store(range_size_bytes=step)
        data = await store.get_range(meta, start=start, end=start + size)
        assert data == pattern(20_000)[start : start + size]
        plan = sorted(asked)
        edges = [start, *(end for _, end in plan)]
        assert edges[-1] == start + size
        assert [begin for begin, _ in plan] == edges[:-1]
        assert all(0 < end - begin <= step for begin, end in plan)

    asyncio.run(run())


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 2000])
async def test_a_broken_body_is_resumed_where_it_stopped(
    scripted: ScriptedService, num_bytes: int, *, is_known: bool
) -> None:
    meta = scripted.put("a", DATA)
    cut = Fault(kind="cut", num_bytes=num_bytes)
    scripted.service.fail("get", None, cut, cut)
    assert await scripted.store.get(meta if is_known else "a") == DATA
    assert scripted.is_clean()


@pytest.mark.parametrize(
    ("size", "begins"),
    [(MIB, [0, 0, 0]), (MIB + 1, [0, 1200, 1500])],
    ids=["a small object", "a large one"],
)
async def test_only_the_rest_of_a_large_broken_body_is_requested(
    scripted: ScriptedService, size: int, begins: list[int]
) -> None:
    data = pattern(size)
    meta = scripted.put("a", data)
    store = scripted.new_store(range_size_bytes=2 * MIB)
    asked: list[tuple[int, int]] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: object) -> object:
        asked.append((request.start, request.end))
        return await inner(request, **settings)

    scripted.service.get = get
    scripted.service.fail(
        "get", Fault(kind="cut", num_bytes=1200), Fault(kind="cut", num_bytes=300)
    )
    assert await store.get(meta) == data
    assert asked == [(begin, size) for begin in begins]


@pytest.mark.parametrize("room", [None, 20 * MIB, 16 * MIB], ids=["get", "into more", "into less"])
async def test_what_may_be_large_begins_with_little(
    scripted: ScriptedService, room: int | None
) -> None:
    data = pattern(19 * MIB)
    scripted.put("a", data)
    store = scripted.new_store(range_size_bytes=16 * MIB)
    asked: list[tuple[int, int]] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: object) -> object:
        asked.append((request.start // MIB, request.end // MIB))
        return await inner(request, **settings)

    scripted.service.get = get
    if room is None:
        assert await store.get("a") == data
        assert asked == [(0, 2), (2, 18), (18, 19)]
        # What is known to be large does, too.
        asked.clear()
        assert await store.get("a") == data
        assert asked == [(0, 2), (2, 18), (18, 19)]
        return
    view = memoryview(bytearray(room))
    num_bytes = await store.get_into("a", view)
    assert view[:num_bytes] == data[:num_bytes]
    if room > 16 * MIB:
        assert asked == [(0, 2), (2, 18), (18, 19)]
    else:
        assert asked == [(0, 16)]  # where one request is enough


async def test_a_body_that_is_short_without_a_word_is_not_believed(
    scripted: ScriptedService,
) -> None:
    meta = scripted.put("a", DATA)
    short = Fault(kind="short", num_bytes=500)
    store = scripted.store
    for known in ("a", meta):
        scripted.service.fail("get", short, short)
        assert await store.get(known) == DATA
        scripted.service.fail("get", short, short)
        buffer = bytearray(3500)
        await scripted.store.get_into(known, memoryview(buffer))
        assert buffer == DATA
        scripted.service.fail("get", short)
        assert await store.get_range(known, start=5, end=905) == DATA[5:905]


@pytest.mark.parametrize("is_known", [True, False])
async def test_wrong_bytes_are_read_again(scripted: ScriptedService, *, is_known: bool) -> None:
    meta = scripted.put("a", DATA)
    scripted.service.fail("get", Fault(kind="flip", num_bytes=7), None, Fault(kind="flip"))
    assert await scripted.store.get(meta if is_known else "a") == DATA
    assert scripted.service.count("get") == 8


@pytest.mark.parametrize("is_known", [True, False])
async def test_bytes_that_stay_wrong_are_an_error(
    scripted: ScriptedService, *, is_known: bool
) -> None:
    meta = scripted.put("a", DATA)
    scripted.service.fail("get", *[Fault(kind="flip", num_bytes=7)] * 12)
    with pytest.raises(ChecksumError, match="3 times") as raised:
        await scripted.store.get(meta if is_known else "a")
    assert raised.value.uri.endswith("/a")
    assert scripted.is_clean()


@pytest.mark.parametrize("is_known", [True, False])
async def test_get_into_verifies_a_whole_object(
    scripted: ScriptedService, *, is_known: bool
) -> None:
    meta = scripted.put("a", DATA)
    buffer = bytearray(4000)
    known = meta if is_known else "a"
    scripted.service.fail("get", Fault(kind="flip", num_bytes=3))
    assert await scripted.store.get_into(known, memoryview(buffer)) == 3500
    assert buffer[:3500] == DATA
    scripted.service.fail("get", *[Fault(kind="flip", num_bytes=3)] * 12)
    with pytest.raises(ChecksumError, match="3 times"):
        await scripted.store.get_into(known, memoryview(buffer))


async def test_verification_can_be_switched_off(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    scripted.service.fail("get", Fault(kind="flip", num_bytes=0))
    data = await scripted.new_store(verify=False).get("a")
    assert data != DATA
    assert data[1:] == DATA[1:]


async def test_attempts_run_out(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    scripted.service.fail("get", *[REFUSE] * 4)
    with pytest.raises(TransientError, match=r"/a.*4 attempts"):
        await scripted.store.get("a")
    assert scripted.service.count("get") == 4
    assert scripted.is_clean()


async def test_one_range_that_fails_ends_the_others(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    hangs = [Fault(kind="hang") for _ in range(2)]
    error = StorageError("no", uri="memory://x/a")
    scripted.service.fail("get", None, *hangs, Fault(kind="refuse", error=error))
    with pytest.raises(StorageError, match="no"):
        await scripted.store.get("a")
    assert scripted.is_clean()


@pytest.mark.parametrize("call", ["get", "get_into"])
async def test_an_object_that_changes_under_a_read_is_read_anew(
    scripted: ScriptedService, call: str
) -> None:
    scripted.put("a", DATA)
    changed = pattern(3500, seed=9)
    hang = Fault(kind="hang")
    scripted.service.fail("get", None, hang)
    buffer = bytearray(3500)
    if call == "get":
        reading = asyncio.create_task(scripted.store.get("a"))
    else:
        reading = asyncio.create_task(scripted.store.get_into("a", memoryview(buffer)))
    await hang.reached.wait()
    scripted.put("a", changed)
    hang.released.set()
    result = await reading
    assert (result if call == "get" else buffer) == changed


async def test_an_object_that_never_stands_still_is_an_error(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    gone = Fault(kind="refuse", error=NotFoundError("gone", uri="memory://x/a"))
    scripted.service.fail("get", *[None, gone, gone, gone] * 4)
    with pytest.raises(PreconditionFailedError, match="replaced while it was read, 4 times"):
        await scripted.new_store(max_in_flight=1).get("a")


async def get(store: aioflux.Store) -> bytes:
    return await store.get("a")


async def get_into(store: aioflux.Store) -> bytes:
    buffer = bytearray(len(DATA))
    await store.get_into("a", memoryview(buffer))
    return bytes(buffer)


async def get_range(store: aioflux.Store) -> bytes:
    return await store.get_range("a", start=0, end=len(DATA))


async def get_many(store: aioflux.Store) -> bytes:
    [(_, data)] = [pair async for pair in store.get_many(["a"])]
    return data


class Restless(FlakyService):
    """Its object is replaced after each of the first looks at it by name.

    Attributes:
        times: When it was looked at.
    """

    num_replaced = 7

    def __init__(self, clock: Clock) -> None:
        name = uuid.uuid4().hex
        super().__init__(service_of(f"memory://{name}"))
        self._bucket = memory_bucket(name)
        self._clock = clock
        self.times: list[float] = []

    def _look(self, generation: str) -> None:
        if not generation:
            self.times.append(self._clock.now)
            if len(self.times) <= self.num_replaced:
                self._bucket.store("a", DATA)

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        meta = await super().head(key, generation=generation)
        self._look(generation)
        return meta

    async def get(self, request: ReadRequest, **settings: Any) -> Body:
        body = await super().get(request, **settings)
        self._look(request.generation)
        return body


@pytest.mark.parametrize("read", [get, get_into, get_range, get_many])
async def test_a_read_by_name_of_what_is_replaced_often_pauses_between_its_tries(
    clock: Clock, read: Callable[[aioflux.Store], Awaitable[bytes]]
) -> None:
    service = Restless(clock)
    scripted = ScriptedService("unused", service=service)
    await service.put(WriteRequest("a"), [DATA], crc32c=None)
    store = scripted.new_store(retry=RetryPolicy(initial_seconds=1.0))
    store.session.unknown_size.add(1)
    assert await read(store) == DATA
    waits = [after - before for before, after in itertools.pairwise(service.times)]
    assert len(waits) == service.num_replaced
    assert all(0 < wait <= 2.0**at for at, wait in enumerate(waits))


async def test_a_pinned_read_of_what_is_gone_is_not_begun_again(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    scripted.put("a", pattern(3500, seed=9))
    with pytest.raises(NotFoundError):
        await scripted.store.get(meta)


async def test_cancelling_a_read_gives_every_place_back(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    hangs = [Fault(kind="hang") for _ in range(4)]
    scripted.service.fail("get", *hangs)
    reading = asyncio.create_task(scripted.store.get(meta))
    for hang in hangs:
        await hang.reached.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert scripted.is_clean()
    assert (await scripted.store.get(meta)) == DATA


async def test_no_more_ranges_than_the_limit_are_under_way(scripted: ScriptedService) -> None:
    meta = scripted.put("a", pattern(20_000))
    hangs = [Fault(kind="hang") for _ in range(20)]
    scripted.service.fail("get", *hangs)
    reading = asyncio.create_task(scripted.store.get(meta))
    for hang in hangs[: OPTIONS.max_in_flight]:
        await hang.reached.wait()
    await asyncio.sleep(0)
    assert scripted.service.count("get") == OPTIONS.max_in_flight
    for hang in hangs:
        hang.released.set()
    assert (await reading) == pattern(20_000)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3500])
async def test_an_object_costs_as_few_requests_as_ranges(
    scripted: ScriptedService, size: int
) -> None:
    scripted.put("a", pattern(size))
    assert (await scripted.store.get("a")) == pattern(size)
    assert len(scripted.service.calls) == max(1, -(-size // 1000))
