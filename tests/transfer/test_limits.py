"""Requests and bytes under way at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._transfer.admission import (
    AdaptiveLimit,
    Admission,
    Counters,
    RequestRate,
    plan_start,
)
from aioflux._transfer.read_plan import SizeEstimate


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def start(budget: ByteBudget, size: int, order: list[int]) -> asyncio.Task[None]:
    async def acquire() -> None:
        await budget.acquire(size)
        order.append(size)

    return asyncio.create_task(acquire())


def take(
    limit: AdaptiveLimit, name: str, order: list[str], *, in_front: bool = False
) -> asyncio.Task[None]:
    async def acquire() -> None:
        await limit.acquire(in_front=in_front)
        order.append(name)

    return asyncio.create_task(acquire())


async def test_bytes_are_granted_in_the_order_of_asking() -> None:
    budget, order = ByteBudget(100), []
    await budget.acquire(60)
    tasks = [start(budget, size, order) for size in (50, 30, 20)]
    await settle()
    # 30 would fit, but is not let past 50.
    assert order == []
    budget.release(60)
    await asyncio.gather(*tasks)
    assert order == [50, 30, 20]
    assert budget.held_bytes == 100


async def test_more_than_the_whole_budget_passes_alone() -> None:
    budget, order = ByteBudget(100), []
    await budget.acquire(1)
    tasks = [start(budget, size, order) for size in (500, 2)]
    await settle()
    assert order == []
    budget.release(1)
    await settle()
    assert order == [500]
    budget.release(500)
    await asyncio.gather(*tasks)
    assert order == [500, 2]


async def test_who_gives_up_waiting_lets_the_next_pass() -> None:
    budget, order = ByteBudget(100), []
    await budget.acquire(60)
    large, small = start(budget, 100, order), start(budget, 40, order)
    await settle()
    large.cancel()
    await small
    assert order == [40]
    assert budget.held_bytes == 100


async def test_who_is_cancelled_as_the_bytes_are_granted_gives_them_back() -> None:
    budget = ByteBudget(100)
    await budget.acquire(100)
    waiting = start(budget, 70, [])
    await settle()
    budget.release(100)  # granted, but the task has not run since
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert budget.held_bytes == 0


async def test_bytes_freed_as_the_first_in_line_gives_up_go_to_the_next() -> None:
    budget, order = ByteBudget(100), []
    await budget.acquire(100)
    first, second = start(budget, 70, order), start(budget, 20, order)
    await settle()
    first.cancel()
    budget.release(100)  # before the task that gives up has run
    await second
    assert order == [20]
    assert budget.held_bytes == 20


steps = st.lists(
    st.tuples(st.sampled_from(["acquire", "release", "cancel"]), st.integers(0, 60)), max_size=40
)


@given(steps)
def test_the_budget_is_never_overdrawn_and_no_one_is_forgotten(
    steps: list[tuple[str, int]],
) -> None:
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, int]]) -> None:
    budget = ByteBudget(50)
    granted: list[int] = []
    waiting: list[tuple[int, asyncio.Task[None]]] = []
    held: list[int] = []
    for action, number in steps:
        if action == "acquire":
            waiting.append((number, start(budget, number, granted)))
        elif action == "release" and held:
            budget.release(held.pop(number % len(held)))
        elif action == "cancel" and waiting:
            _, task = waiting.pop(number % len(waiting))
            task.cancel()
        await settle()
        # The model: first come, first served, as long as it fits or nothing else is held.
        while waiting and (sum(held) <= 0 or sum(held) + waiting[0][0] <= 50):
            size, task = waiting.pop(0)
            assert task.done()
            held.append(size)
        assert not any(task.done() for _, task in waiting)
        assert budget.held_bytes == sum(held)
    for _, task in waiting:
        task.cancel()
    await settle()
    assert budget.held_bytes == sum(held)


async def test_as_many_as_the_limit_hold_a_place_at_once() -> None:
    limit, order = AdaptiveLimit(2), []
    tasks = [take(limit, name, order) for name in "abc"]
    await settle()
    assert (order, limit.num_held) == (["a", "b"], 2)
    limit.release()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]


async def test_what_was_begun_goes_before_what_waits_in_line() -> None:
    limit, order = AdaptiveLimit(1), []
    await limit.acquire()
    tasks = [take(limit, "first", order), take(limit, "second", order)]
    await settle()
    tasks.append(take(limit, "begun", order, in_front=True))
    await settle()
    for _ in tasks:
        limit.release()
        await settle()
    assert order == ["begun", "first", "second"]


async def test_a_throttled_answer_halves_the_limit_once_for_all_that_were_sent_before() -> None:
    limit = AdaptiveLimit(64)
    for _ in range(64):
        await limit.acquire()
    for _ in range(64):
        limit.on_throttled(0)
    assert limit.limit == 32
    limit.on_throttled(limit.num_cuts)
    assert limit.limit == 16


async def test_the_limit_never_falls_below_one() -> None:
    limit = AdaptiveLimit(3)
    for _ in range(10):
        limit.on_throttled(limit.num_cuts)
    assert limit.limit == 1


async def test_a_request_without_a_body_does_not_wait_for_bytes() -> None:
    """Otherwise a part above the budget delays the polls of a save until it is sent."""
    budget = ByteBudget(100)
    await budget.acquire(500)
    waiting = start(budget, 500, [])
    await settle()
    assert budget.try_acquire(0)
    await budget.acquire(0)
    budget.release(0)
    assert budget.held_bytes == 500
    budget.release(500)
    await waiting


async def test_successes_grow_the_limit_back_to_what_the_user_set() -> None:
    limit = AdaptiveLimit(64)
    for _ in range(6):
        limit.on_throttled(limit.num_cuts)
    assert limit.limit == 1
    num_successes = 0
    while limit.limit < 64:
        await limit.acquire()
        limit.release_after_success()
        num_successes += 1
    assert num_successes < 600
    await limit.acquire()
    limit.release_after_success()
    assert limit.limit == 64


async def test_a_cut_limit_lets_no_one_in_before_enough_have_left() -> None:
    limit, order = AdaptiveLimit(4), []
    for _ in range(4):
        await limit.acquire()
    limit.on_throttled(limit.num_cuts)
    waiting = take(limit, "next", order)
    for expected in ([], [], ["next"]):
        limit.release()
        await settle()
        assert order == expected
    await waiting
    assert limit.num_held == 2


async def test_growth_lets_in_who_waits() -> None:
    limit, order = AdaptiveLimit(2), []
    await limit.acquire()
    await limit.acquire()
    limit.on_throttled(limit.num_cuts)
    waiting = take(limit, "next", order)
    await settle()
    assert order == []
    limit.release_after_success()
    await waiting
    assert limit.num_held == 2


async def test_who_is_cancelled_as_a_place_is_granted_passes_it_on() -> None:
    limit, order = AdaptiveLimit(1), []
    await limit.acquire()
    first, second = take(limit, "first", order), take(limit, "second", order)
    await settle()
    limit.release()  # granted to the first, whose task has not run since
    first.cancel()
    await second
    assert order == ["second"]
    assert limit.num_held == 1


async def test_a_place_freed_as_the_first_in_line_gives_up_goes_to_the_next() -> None:
    limit, order = AdaptiveLimit(1), []
    await limit.acquire()
    first, second = take(limit, "first", order), take(limit, "second", order)
    await settle()
    first.cancel()
    limit.release()  # before the task that gives up has run
    await second
    assert order == ["second"]
    assert limit.num_held == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "front", "release", "cancel", "cut", "grow"]),
            st.integers(0, 60),
        ),
        max_size=60,
    )
)
def test_no_more_than_the_limit_hold_a_place_and_no_one_is_forgotten(
    steps: list[tuple[str, int]],
) -> None:
    asyncio.run(play_places(steps))


async def play_places(steps: list[tuple[str, int]]) -> None:
    limit = AdaptiveLimit(5)
    waiting: list[asyncio.Task[None]] = []
    held, peak_after_cut = 0, 5
    for action, number in steps:
        if action in {"acquire", "front"}:
            waiting.append(take(limit, action, [], in_front=action == "front"))
        elif action == "release" and held:
            limit.release()
            held -= 1
        elif action == "cancel" and waiting:
            waiting.pop(number % len(waiting)).cancel()
        elif action == "cut":
            limit.on_throttled(limit.num_cuts)
        elif action == "grow" and held:
            limit.release_after_success()
            held -= 1
        await settle()
        granted = [task for task in waiting if task.done()]
        waiting = [task for task in waiting if not task.done()]
        held += len(granted)
        assert limit.num_held == held
        assert not granted or held <= limit.limit
        assert not waiting or held >= limit.limit
        assert 1 <= limit.limit <= peak_after_cut
    for task in waiting:
        task.cancel()
    await settle()


def test_the_estimate_follows_the_sizes() -> None:
    estimate = SizeEstimate(aioflux.TransferOptions())
    for _ in range(100):
        estimate.add(50)
    assert estimate.num_bytes == pytest.approx(50, abs=1)


# --- both at once --------------------------------------------------------------------------


def admission(**limits: int) -> Admission:
    return Admission(retry=aioflux.RetryPolicy(), counters=Counters(), **limits)


class Waiter:
    """A waiter without a future."""

    def __init__(self) -> None:
        self.num_slots = 0

    def cancelled(self) -> bool:
        return False

    def set_result(self, result: None, /) -> None:
        self.num_slots += 1


def test_without_the_bytes_neither_they_nor_a_place_are_taken() -> None:
    limits, waiter = admission(max_in_flight=2, max_in_flight_bytes=100), Waiter()
    assert limits.try_enter(60)
    assert not limits.try_enter(60)
    assert not limits.add_waiter(waiter, 60)
    assert (limits.bytes.held_bytes, limits.slots.num_held) == (60, 1)
    limits.cancel(60)
    assert waiter.num_slots == 0
    assert (limits.bytes.held_bytes, limits.slots.num_held) == (0, 0)


def test_without_a_place_the_bytes_are_kept_by_those_in_line_alone() -> None:
    limits, first, second = admission(max_in_flight=1, max_in_flight_bytes=100), Waiter(), Waiter()
    assert limits.try_enter(10)
    assert not limits.try_enter(20)
    assert limits.bytes.held_bytes == 10
    assert limits.add_waiter(first, 20)
    assert limits.add_waiter(second, 30)
    assert limits.bytes.held_bytes == 60
    limits.remove_waiter(first, 20)
    limits.cancel(10)
    assert (first.num_slots, second.num_slots) == (0, 1)
    assert (limits.bytes.held_bytes, limits.slots.num_held) == (30, 1)
    limits.cancel(30)
    assert (limits.bytes.held_bytes, limits.slots.num_held) == (0, 0)


async def test_another_request_within_a_slot_waits_for_a_token() -> None:
    limits, loop = admission(max_in_flight=1, max_in_flight_bytes=1), asyncio.get_running_loop()
    limits.slots.rate = RequestRate(100.0, fraction=0.0)
    started_at = loop.time()
    await limits.start_another(5)
    assert loop.time() - started_at >= 0.009
    assert (limits.counters.num_requests, limits.counters.bytes_received) == (1, 5)


# --- the start of a job -----------------------


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_few_ranks_start_at_once_with_the_limit_of_the_user(world_size: int) -> None:
    assert plan_start(256, world_size, 0.999) == (256, 0)


@given(st.integers(65, 100_000), st.integers(1, 1024))
def test_first_requests_of_many_ranks_are_at_most_5000_a_second(
    world_size: int, max_in_flight: int
) -> None:
    first, longest = plan_start(max_in_flight, world_size, 1.0)
    assert world_size / longest == pytest.approx(5000)
    assert min(max_in_flight, 8) <= first <= max_in_flight
    assert first <= 8 or first * world_size <= 5000


async def test_a_limit_that_opens_later_holds_requests_until_then() -> None:
    limit, order = AdaptiveLimit(64), []
    limit.start_slowly(2, delay_seconds=0.001)
    assert not limit.try_acquire()
    tasks = [take(limit, name, order) for name in "abc"]
    await asyncio.gather(*tasks[:2])
    assert (order, limit.limit, limit.num_held) == (["a", "b"], 2, 2)
    limit.release()
    await tasks[2]
    for _ in range(1000):
        limit.release_after_success()
        await limit.acquire()
    assert limit.limit == 64


async def test_a_store_of_one_of_many_ranks_reads_after_its_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first requests wait, and it starts with its share of the requests of one second."""
    monkeypatch.setenv("WORLD_SIZE", "200")  # as torchrun does
    async with aioflux.open_store("memory://bucket") as store:
        assert (await store.put("a", b"x")).size == 1
        assert await store.get("a") == b"x"
        assert store.stats.max_in_flight == 25
