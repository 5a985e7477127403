"""Reading many objects ahead of a consumer: what is held, and that nobody waits without end."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux import NotFoundError, PreconditionFailedError, RetryPolicy
from aioflux._concurrency.byte_budget import PrefetchBudget
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import ScriptedService, pattern

if TYPE_CHECKING:
    from aioflux import Store
    from aioflux._services.base import ReadRequest
    from tests.transfer.clock import Clock

BUDGET = 16_000
is_ordered = pytest.mark.parametrize("ordered", [True, False], ids=["in order", "as they come"])


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Held:
    """Counts the whole objects that are read or wait for the consumer.

    An object that is larger than its first range is read with its generation, once there is memory
    for all of it.
    """

    def __init__(self, scripted: ScriptedService) -> None:
        self.sizes: dict[str, int] = {}
        self.peak = 0
        inner = scripted.service.get

        async def get(request: ReadRequest, **settings: Any) -> Any:
            await asyncio.sleep(0)
            if request.generation:
                self.sizes[request.key] = len(scripted.get(request.key))
                self.peak = max(self.peak, sum(self.sizes.values()))
            return await inner(request, **settings)

        scripted.service.get = get

    async def drain(self, store: Store, keys: list[str], *, ordered: bool) -> dict[str, bytes]:
        """Read everything, with a consumer that is slow."""
        got: dict[str, bytes] = {}
        async with asyncio.timeout(60):
            async for batch in store.get_batches(keys, ordered=ordered):
                await settle()
                for key, data in batch:
                    got[key] = data
                    self.sizes.pop(key, None)
        return got


@is_ordered
@pytest.mark.parametrize("range_size", [2000, 16_000])
async def test_objects_that_become_large_stay_within_the_budget(
    scripted: ScriptedService, range_size: int, *, ordered: bool
) -> None:
    store = scripted.new_store(
        max_in_flight=16, max_in_flight_bytes=BUDGET, range_size_bytes=range_size
    )
    sizes = {f"small {at:03}": 100 for at in range(100)}
    sizes |= {f"large {at:03}": 5000 + 10 * at for at in range(40)}
    for key, size in sizes.items():
        scripted.put(key, pattern(size))
    held = Held(scripted)
    got = await held.drain(store, list(sizes), ordered=ordered)
    assert {key: len(data) for key, data in got.items()} == sizes
    assert list(got) == list(sizes) or not ordered
    # In order, the item that all others wait for may go beyond.
    assert 5000 < held.peak <= BUDGET + (6000 if ordered else 0)
    assert scripted.is_clean()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 10, 900, 1001, 2500, 3999, 9000]), min_size=1, max_size=25),
    width=st.integers(1, 5),
    range_size=st.sampled_from([500, 1000, 10_000]),
    ordered=st.booleans(),
)
def test_whatever_the_sizes_everything_arrives(
    sizes: list[int], width: int, range_size: int, *, ordered: bool
) -> None:
    async def run() -> None:
        scripted = ScriptedService(f"many-{uuid.uuid4().hex}")
        store = scripted.new_store(
            max_in_flight=width, max_in_flight_bytes=4000, range_size_bytes=range_size
        )
        for at, size in enumerate(sizes):
            scripted.put(f"{at:02}", pattern(size, seed=at))
        held = Held(scripted)
        got = await held.drain(store, [f"{at:02}" for at in range(len(sizes))], ordered=ordered)
        assert sorted(got.items()) == [
            (f"{at:02}", pattern(size, seed=at)) for at, size in enumerate(sizes)
        ]
        assert held.peak <= 4000 + max(sizes)
        assert scripted.is_clean()

    asyncio.run(run())


@is_ordered
async def test_first_ranges_stay_within_what_was_acquired_for_them(
    scripted: ScriptedService, *, ordered: bool
) -> None:
    """While 15 reads wait for a small range each, the objects of the store turn out to be large."""
    store = scripted.new_store(max_in_flight=16, max_in_flight_bytes=4000, range_size_bytes=10_000)
    store.session.unknown_size.add(100)
    listed = scripted.put("listed", pattern(3990))
    names = [f"{at:02}" for at in range(15)]
    for name in names:
        scripted.put(name, pattern(3000))
    may_end, asked, inner = asyncio.Event(), [], scripted.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        if request.key == "listed":
            await may_end.wait()
        elif not request.generation:
            asked.append(request.end)
        return await inner(request, **settings)

    scripted.service.get = get
    batches = store.get_batches([listed, *names], ordered=ordered)
    first = asyncio.ensure_future(anext(batches))
    await settle()
    for _ in range(20):
        store.session.unknown_size.add(3000)
    may_end.set()
    keys = [key for key, _ in await first]
    second = asyncio.ensure_future(anext(batches))
    await settle()
    assert 0 < sum(asked) <= 4000
    keys += [key for key, _ in await second]
    async for batch in batches:
        keys += [key for key, _ in batch]
    assert sorted(keys) == sorted([*names, "listed"])
    assert scripted.is_clean()


def large_ones(scripted: ScriptedService, **options: Any) -> Store:
    """Two objects, of which the budget has room for one."""
    for key in "ab":
        scripted.put(key, pattern(3000, seed=ord(key)))
    return scripted.new_store(max_in_flight=2, max_in_flight_bytes=4000, **options)


async def test_an_object_for_which_there_is_no_room_is_read_again_as_it_is_then(
    scripted: ScriptedService,
) -> None:
    """`b` finds no room, waits until `a` was given out, and is replaced meanwhile."""
    store = large_ones(scripted)
    batches = store.get_batches(["a", "b"], ordered=True)
    [[_, first]] = await anext(batches)
    await settle()
    changed = pattern(3100, seed=9)
    scripted.put("b", changed)
    [[_, second]] = await anext(batches)
    assert (first, second) == (pattern(3000, seed=ord("a")), changed)
    assert await anext(batches, None) is None
    assert scripted.is_clean()


async def test_an_object_that_is_gone_when_there_is_room_is_not_found(
    scripted: ScriptedService,
) -> None:
    store = large_ones(scripted)
    batches = store.get_batches(["a", "b"], ordered=True)
    await anext(batches)
    await settle()
    scripted.bucket.remove("b")
    with pytest.raises(NotFoundError, match="/b"):
        await anext(batches)
    assert scripted.is_clean()


async def test_an_object_that_is_replaced_each_time_is_an_error(scripted: ScriptedService) -> None:
    scripted.put("a", pattern(3000))
    store = scripted.new_store()
    store.session.unknown_size.add(10**12)
    gone = NotFoundError("gone", uri="memory://x/a")
    scripted.service.fail("get", *[Fault(kind="refuse", error=gone) for _ in range(20)])
    with pytest.raises(PreconditionFailedError, match="replaced while it was read, 4 times"):
        _ = [batch async for batch in store.get_batches(["a"], ordered=True)]
    assert scripted.is_clean()


async def test_an_object_that_is_replaced_often_is_read_after_a_pause(
    scripted: ScriptedService, clock: Clock
) -> None:
    data = pattern(3000)
    scripted.put("a", data)
    store = scripted.new_store(retry=RetryPolicy(initial_seconds=1.0))
    store.session.unknown_size.add(10**12)
    gone = NotFoundError("gone", uri="memory://x/a")
    scripted.service.fail("get", *[Fault(kind="refuse", error=gone) for _ in range(7)])
    begun = clock.now
    [[[_, found]]] = [batch async for batch in store.get_batches(["a"], ordered=True)]
    assert found == data
    assert clock.now > begun


async def test_of_large_objects_the_size_is_requested_first(scripted: ScriptedService) -> None:
    for at in range(6):
        scripted.put(f"{at}", pattern(3000))
    store = scripted.new_store(max_in_flight_bytes=4000)
    store.session.unknown_size.add(10**6)
    got = [batch async for batch in store.get_batches(map(str, range(6)), ordered=True)]
    assert sum(len(batch) for batch in got) == 6
    assert scripted.service.count("head") == 6
    assert scripted.service.count("get") == 6 * 3  # no range came in vain


async def test_a_guess_costs_no_request(scripted: ScriptedService) -> None:
    """Before any size is known, nobody asks for one."""
    scripted.put("a", b"1")
    store = scripted.new_store(range_size_bytes=1)
    assert not store.session.unknown_size.is_known
    _ = [batch async for batch in store.get_batches(["a"], ordered=True)]
    assert len(scripted.service.calls) == 1


async def test_what_was_listed_is_charged_and_pinned(scripted: ScriptedService) -> None:
    metas = [scripted.put(f"{at}", pattern(900)) for at in range(6)]
    store = scripted.new_store(max_in_flight_bytes=1000)
    got = [pair async for batch in store.fetch_batches(metas) for pair in batch]
    assert [meta for meta, _ in got] == metas


# --- the budget ----------------------------------------------------------------------------


def waiting_for(
    budget: PrefetchBudget, index: int, size: int, order: list[int]
) -> asyncio.Task[None]:
    async def acquire() -> None:
        await budget.reserve(index).acquire(size)
        order.append(index)

    return asyncio.create_task(acquire())


async def test_who_waits_passes_in_the_order_of_the_items() -> None:
    budget, order = PrefetchBudget(100, ordered=False), []
    holder = budget.reserve(0)
    await holder.acquire(60)
    tasks = [waiting_for(budget, index, size, order) for index, size in ((3, 20), (2, 50), (1, 50))]
    await settle()
    assert order == [3]  # it came first, and nobody before it waited then
    assert not budget.reserve(4).grow(1)
    assert holder.grow(61)  # only those before it would come first
    holder.set(0)
    await settle()
    assert order == [3, 1]
    budget.release_yielded(1, 50)
    await asyncio.gather(*tasks)
    assert order == [3, 1, 2]


async def test_the_next_item_in_order_does_not_wait_for_the_budget() -> None:
    budget, order = PrefetchBudget(100, ordered=True), []
    first, second = budget.reserve(0), budget.reserve(1)
    await first.acquire(10)
    await second.acquire(60)
    assert first.grow(500)
    assert first.grow(9)
    assert first.num_bytes == 500
    waiting = waiting_for(budget, 2, 90, order)
    await settle()
    budget.release_yielded(1, 500)
    await settle()
    assert order == []
    budget.release_yielded(1, 0)
    await waiting


async def test_who_gives_up_waiting_lets_the_next_pass() -> None:
    budget, order = PrefetchBudget(100, ordered=False), []
    await budget.reserve(0).acquire(60)
    large, small = waiting_for(budget, 1, 100, order), waiting_for(budget, 2, 40, order)
    await settle()
    large.cancel()
    budget.change(0)
    assert order == []
    await small
    assert order == [2]


async def test_who_is_cancelled_as_the_bytes_are_granted_gives_them_back() -> None:
    budget, order = PrefetchBudget(100, ordered=False), []
    holder = budget.reserve(0)
    await holder.acquire(100)
    first, second = waiting_for(budget, 1, 100, order), waiting_for(budget, 2, 100, order)
    await settle()
    holder.set(0)
    first.cancel()
    await second
    assert order == [2]
