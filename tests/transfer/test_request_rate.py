"""The requests per second of a store."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import TransferOptions
from aioflux._transfer.admission import AdaptiveLimit, RequestRate
from perf.cluster.clock import run


@given(
    st.floats(0.1, 1000), st.floats(0, 0.999), st.lists(st.floats(0, 5), min_size=1, max_size=60)
)
def test_no_more_tokens_are_taken_than_were_added(
    per_second: float, fraction: float, pauses: list[float]
) -> None:
    rate, now, num_taken = RequestRate(per_second, fraction=fraction), 100.0, 0
    for pause in pauses:
        now += pause
        num_taken += rate.try_acquire(now) == 0
    assert num_taken <= max(1, per_second / 10) + per_second * sum(pauses) + 1e-6


@given(st.floats(0.1, 1000), st.floats(0, 0.999))
def test_a_token_is_there_after_the_wait(per_second: float, fraction: float) -> None:
    rate, now = RequestRate(per_second, fraction=fraction), 0.0
    for _ in range(5):
        while wait := rate.try_acquire(now):
            now += wait
    assert now <= 5 / per_second + 1e-6


def test_a_token_that_was_not_used_is_restored() -> None:
    rate = RequestRate(1.0, fraction=0.0)
    assert rate.try_acquire(0.0) == 1
    assert rate.try_acquire(1.0) == 0
    rate.restore()
    assert rate.try_acquire(1.0) == 0
    assert rate.try_acquire(1.0) == 1


def test_waiters_get_their_slots_in_order_as_the_rate_allows() -> None:
    async def acquire_all() -> list[tuple[int, float]]:
        limit, order = AdaptiveLimit(64), []
        limit.rate = RequestRate(2.0, fraction=0.0)
        loop = asyncio.get_running_loop()

        async def acquire(number: int) -> None:
            await limit.acquire()
            order.append((number, loop.time()))

        await asyncio.gather(*(acquire(number) for number in range(5)))
        return order

    numbers, times = zip(*run(acquire_all()), strict=True)
    assert numbers == (0, 1, 2, 3, 4)
    assert times == pytest.approx((0.5, 1.0, 1.5, 2.0, 2.5))


def test_a_waiter_that_is_cancelled_takes_no_token() -> None:
    async def acquire_some() -> float:
        limit = AdaptiveLimit(64)
        limit.rate = RequestRate(1.0, fraction=0.0)
        first, second = (asyncio.ensure_future(limit.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        return asyncio.get_running_loop().time()

    assert run(acquire_some()) == pytest.approx(1.0)


def test_a_waiter_that_is_cancelled_with_its_slot_restores_its_token() -> None:
    """The slot was granted, and the task was cancelled before it ran: it sends no request."""

    async def acquire_some() -> float:
        limit, loop = AdaptiveLimit(64), asyncio.get_running_loop()
        limit.rate = RequestRate(1.0, fraction=0.0)
        first = asyncio.ensure_future(limit.acquire())
        await asyncio.sleep(0)
        loop.call_at(loop.time() + 1.0, first.cancel)  # after the timer that grants the slot
        await asyncio.wait((first,))
        assert first.cancelled()
        assert limit.num_held == 0
        await limit.acquire()
        return loop.time()

    assert run(acquire_some()) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0, -1, float("inf")])
def test_a_rate_is_a_finite_number_above_0(value: float) -> None:
    with pytest.raises(ValueError, match="max_requests_per_second"):
        TransferOptions(max_requests_per_second=value)
