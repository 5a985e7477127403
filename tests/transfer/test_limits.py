"""Requests and bytes under way at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux.transfer._limits import ByteBudget, Limits, SizeEstimate


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def start(budget: ByteBudget, size: int, order: list[int]) -> asyncio.Task[None]:
    async def acquire() -> None:
        await budget.acquire(size)
        order.append(size)

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


async def test_bytes_that_are_there_already_are_charged_without_waiting() -> None:
    budget, order = ByteBudget(100), []
    budget.charge(150)
    task = start(budget, 0, order)
    await settle()
    assert order == []
    budget.release(100)
    await task
    assert budget.held_bytes == 50


steps = st.lists(
    st.tuples(st.sampled_from(["acquire", "release", "cancel"]), st.integers(0, 60)), max_size=40
)


@given(steps)
def test_the_budget_is_never_overdrawn_and_nobody_is_forgotten(
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


async def test_a_slot_is_given_back_after_an_error() -> None:
    limits = Limits(max_in_flight=1, max_in_flight_bytes=10)
    for _ in range(3):
        with suppress(ZeroDivisionError):
            async with limits.slot(10):
                assert limits.requests.locked()
                raise ZeroDivisionError
    assert limits.bytes.held_bytes == 0
    assert not limits.requests.locked()


async def test_who_waits_for_a_place_gives_its_bytes_back_when_cancelled() -> None:
    limits = Limits(max_in_flight=1, max_in_flight_bytes=100)

    async def hold(size: int) -> None:
        async with limits.slot(size):
            await asyncio.Event().wait()

    first, second = asyncio.create_task(hold(10)), asyncio.create_task(hold(20))
    await settle()
    assert limits.bytes.held_bytes == 30
    second.cancel()
    await settle()
    assert limits.bytes.held_bytes == 10
    first.cancel()
    await settle()
    assert limits.bytes.held_bytes == 0


def test_the_estimate_follows_the_sizes() -> None:
    estimate = SizeEstimate(first_bytes=1000)
    for _ in range(100):
        estimate.add(50)
    assert estimate.num_bytes == pytest.approx(50, abs=1)
