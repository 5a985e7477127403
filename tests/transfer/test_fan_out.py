"""Many items through one function: order, bounds, failures and ends."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._concurrency.fan_out import bounded_batches, bounded_map, gather, pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Gate:
    """A function whose calls end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.open: dict[int, asyncio.Future[int]] = {}

    async def __call__(self, item: int) -> int:
        self.begun.append(item)
        self.open[item] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[item]
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise

    def end(self, item: int) -> None:
        self.open.pop(item).set_result(item)

    def fail(self, item: int, error: BaseException) -> None:
        self.open.pop(item).set_exception(error)


async def take(batches: AsyncIterator[list[int]]) -> list[int]:
    return await anext(batches, [])


async def test_results_come_in_the_order_of_the_items() -> None:
    gate = Gate()
    batches = bounded_batches(gate, range(4), max_in_flight=4)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        for item in (3, 1, 2):
            gate.end(item)
        await settle()
        assert not first.done()
        gate.end(0)
        assert await first == [0, 1, 2, 3]
        assert await take(batches) == []


@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "as they come"])
async def test_a_list_ends_when_its_results_are_heavy_enough(*, ordered: bool) -> None:
    """What follows in another list is not given yet: a consumer of the first lets one begin."""
    gate = Gate()
    batches = bounded_batches(
        gate, range(9), max_in_flight=2, ordered=ordered, weigh=lambda item: 0.5 if item else 1
    )
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        for item in range(4):
            gate.end(item)
            await settle()
        assert await first == [0]
        assert await take(batches) == [1, 2]
        assert await take(batches) == [3]


async def test_results_come_as_they_arrive() -> None:
    gate = Gate()
    batches = bounded_batches(gate, range(4), max_in_flight=4, ordered=False)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        gate.end(3)
        assert await first == [3]
        gate.end(1)
        gate.end(0)
        await settle()
        assert await take(batches) == [1, 0]
        gate.end(2)
        assert await take(batches) == [2]
        assert await take(batches) == []


@pytest.mark.parametrize("items", [[0], iter([0])], ids=["list", "iterator"])
async def test_one_item_starts_at_most_two_workers(items) -> None:
    """Workers are started when items are taken, and not all at once."""
    gate = Gate()
    before = asyncio.all_tasks()
    batches = bounded_batches(gate, items, max_in_flight=256)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        assert len(asyncio.all_tasks() - before - {first}) <= 2
        gate.end(0)
        assert await first == [0]


@pytest.mark.parametrize("num_settled", range(6))
async def test_an_iteration_that_ends_while_a_worker_starts_leaves_no_task(num_settled) -> None:
    gate = Gate()
    before = asyncio.all_tasks()
    batches = bounded_batches(gate, range(99), max_in_flight=8)
    first = asyncio.create_task(take(batches))
    for _ in range(num_settled):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await batches.aclose()
    assert asyncio.all_tasks() == before


async def test_no_more_than_the_bound_is_under_way() -> None:
    gate = Gate()
    batches = bounded_batches(gate, range(10), max_in_flight=3)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        assert gate.begun == [0, 1, 2]
        gate.end(1)
        await settle()
        assert gate.begun == [0, 1, 2, 3]
        gate.end(0)
        assert await first == [0, 1]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_slow_consumer_holds_the_work_back(*, ordered: bool) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    async def work(item: int) -> int:
        return item

    batches = bounded_batches(work, items(), max_in_flight=3, ordered=ordered)
    async with aclosing(batches):
        await take(batches)
        await settle()
        assert len(taken) <= 12


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
@given(delays=st.lists(st.integers(0, 5), max_size=30), width=st.integers(1, 8))
def test_every_item_gives_one_result(
    delays: list[int], width: int, *, ordered: bool, is_async: bool
) -> None:
    async def items() -> AsyncIterator[tuple[int, int]]:
        for item in enumerate(delays):
            await asyncio.sleep(0)
            yield item

    async def work(item: tuple[int, int]) -> int:
        for _ in range(item[1]):
            await asyncio.sleep(0)
        return item[0]

    async def collect() -> list[int]:
        source = items() if is_async else enumerate(delays)
        results = bounded_map(work, source, max_in_flight=width, ordered=ordered)
        return [result async for result in results]

    results = asyncio.run(collect())
    assert (results if ordered else sorted(results)) == list(range(len(delays)))


async def test_a_failure_waits_for_its_turn_where_order_is_kept() -> None:
    gate = Gate()
    batches = bounded_batches(gate, range(3), max_in_flight=3)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        gate.fail(1, ValueError("one"))
        await settle()
        assert not first.done()
        gate.end(0)
        assert await first == [0]
        with pytest.raises(ValueError, match="one"):
            await anext(batches)
    assert gate.cancelled == [2]


async def test_a_failure_comes_at_once_where_order_is_not_kept() -> None:
    gate = Gate()
    batches = bounded_batches(gate, range(3), max_in_flight=3, ordered=False)
    first = asyncio.create_task(take(batches))
    await settle()
    gate.fail(2, ValueError("two"))
    with pytest.raises(ValueError, match="two"):
        await first
    assert sorted(gate.cancelled) == [0, 1]


async def test_the_iterator_may_fail() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise KeyError("mine")

    gate = Gate()
    batches = bounded_batches(gate, items(), max_in_flight=2)
    first = asyncio.create_task(take(batches))
    await settle()
    gate.end(0)
    assert await first == [0]
    with pytest.raises(KeyError, match="mine"):
        await anext(batches)


async def test_a_call_that_is_cancelled_from_within_ends_the_iteration() -> None:
    gate = Gate()
    batches = bounded_batches(gate, range(5), max_in_flight=2)
    first = asyncio.create_task(take(batches))
    await settle()
    gate.open[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_closing_cancels_and_waits() -> None:
    before = asyncio.all_tasks()
    gate = Gate()
    batches = bounded_batches(gate, range(10), max_in_flight=3)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        gate.end(0)
        assert await first == [0]
        await settle()
    assert sorted(gate.cancelled) == [1, 2, 3]
    assert asyncio.all_tasks() == before


async def test_cancelling_the_consumer_cancels_and_waits() -> None:
    before = asyncio.all_tasks()
    gate = Gate()
    consumer = asyncio.create_task(take(bounded_batches(gate, range(10), max_in_flight=3)))
    await settle()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert sorted(gate.cancelled) == [0, 1, 2]
    assert asyncio.all_tasks() == before


async def test_gather_raises_the_first_failure_itself_and_ends_the_others() -> None:
    gate = Gate()
    waiting = asyncio.create_task(gather(gate(item) for item in range(3)))
    await settle()
    gate.fail(1, KeyError("one"))
    with pytest.raises(KeyError, match="one"):
        await waiting
    assert sorted(gate.cancelled) == [0, 2]


async def test_gather_keeps_the_order() -> None:
    async def work(item: int) -> int:
        await asyncio.sleep(0)
        return item

    assert await gather(work(item) for item in range(5)) == [0, 1, 2, 3, 4]


async def test_a_worker_that_is_cancelled_while_it_waits_for_room_is_reported() -> None:
    gate = Gate()
    before = asyncio.all_tasks()
    batches = bounded_batches(gate, range(9), max_in_flight=1)
    async with aclosing(batches):
        first = asyncio.create_task(take(batches))
        await settle()
        workers = asyncio.all_tasks() - before - {first}
        gate.end(0)
        assert await first == [0]
        gate.end(1)
        await settle()
        for worker in workers:
            worker.cancel()
        await settle()
        assert await take(batches) == [1]
        with pytest.raises(asyncio.CancelledError):
            await take(batches)


async def test_an_expected_error_is_yielded_as_a_result() -> None:
    async def call(item: int) -> float:
        return 1 / item

    def recover(error: BaseException) -> float | None:
        return 0.0 if isinstance(error, ZeroDivisionError) else None

    batches = bounded_batches(call, [1, 0, 2], max_in_flight=2, recover=recover)
    assert [result async for batch in batches for result in batch] == [1.0, 0.0, 0.5]
    failing = bounded_batches(call, [1, 0], max_in_flight=2, recover=lambda _: None)
    with pytest.raises(ZeroDivisionError):
        _ = [batch async for batch in failing]


async def test_a_forked_child_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it cancel the calls, which belong to its parent."""
    gate = Gate()
    batches = bounded_batches(gate, range(2), max_in_flight=2)
    first = asyncio.create_task(take(batches))
    await settle()
    gate.end(0)
    assert await first == [0]
    child = os.getpid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        with pytest.raises(RuntimeError, match="before a fork"):
            await anext(batches)
        assert gate.cancelled == []
    gate.end(1)
    await settle()


async def test_a_forked_child_may_end_an_iteration_without_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def items() -> AsyncIterator[int]:
        await ended.wait()
        for item in ():
            yield item

    ended, child = asyncio.Event(), os.getpid() + 1
    reading = asyncio.create_task(take(bounded_batches(Gate(), items(), max_in_flight=2)))
    await settle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        ended.set()
        assert await reading == []


async def test_a_pair_of_calls_is_awaited_together() -> None:
    gate, other = Gate(), Gate()
    both = asyncio.create_task(pair(gate(1), other(2)))
    await settle()
    other.end(2)
    gate.end(1)
    assert await both == (1, 2)
