"""When a failed request is sent again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import NotFoundError, RetryPolicy, TransientError
from aioflux._transfer.admission import RetryBudget
from aioflux._transfer.retry import backoff_bound, next_delay, with_retry
from tests.transfer.clock import loop_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.transfer.clock import Clock

policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 200),
    initial_seconds=st.floats(0.001, 10),
    multiplier=st.floats(1, 10),
    max_seconds=st.floats(0.001, 100),
    deadline_seconds=st.floats(0.01, 1000),
)
fractions = st.floats(0, 1, exclude_max=True)


@given(policy=policies, attempt=st.integers(1, 10_000))
def test_the_bound_grows_up_to_its_maximum(policy: RetryPolicy, attempt: int) -> None:
    bound = backoff_bound(attempt, policy)
    assert 0 < bound <= policy.max_seconds
    assert bound <= backoff_bound(attempt + 1, policy)


@given(
    policy=policies,
    attempt=st.integers(1, 250),
    elapsed=st.floats(0, 2000),
    asked=st.none() | st.floats(0, 500),
    fraction=fractions,
)
def test_a_delay_keeps_every_limit(
    policy: RetryPolicy, attempt: int, elapsed: float, asked: float | None, fraction: float
) -> None:
    delay = next_delay(
        attempt, policy, elapsed_seconds=elapsed, retry_after_seconds=asked, fraction=fraction
    )
    wanted = fraction * backoff_bound(attempt, policy) + (asked or 0.0)
    if attempt >= policy.max_attempts or elapsed + wanted >= policy.deadline_seconds:
        assert delay is None
    else:
        assert delay == pytest.approx(wanted)
        assert delay >= (asked or 0.0)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def failing(*failures: Exception) -> tuple[Callable[[int], Awaitable[str]], list[int]]:
    """An attempt that fails so, and then succeeds; and the numbers that it was given."""
    numbers: list[int] = []
    left = list(failures)

    async def attempt(number: int) -> str:
        numbers.append(number)
        if left:
            raise left.pop(0)
        return "done"

    return attempt, numbers


POLICY = RetryPolicy(max_attempts=4, initial_seconds=1, multiplier=2, max_seconds=3)


async def test_delays_double_up_to_the_maximum() -> None:
    time = Time()
    attempt, numbers = failing(*[TransientError("busy")] * 3)
    done = await with_retry(attempt, POLICY, clock=time.clock, sleep=time.sleep, jitter=lambda: 0.5)
    assert done == "done"
    assert numbers == [1, 2, 3, 4]
    assert time.slept == [0.5, 1.0, 1.5]


async def test_the_service_is_given_the_time_that_it_requested() -> None:
    time = Time()
    attempt, _ = failing(TransientError("busy", retry_after_seconds=7.0))
    await with_retry(attempt, POLICY, clock=time.clock, sleep=time.sleep, jitter=lambda: 0.25)
    assert time.slept == [7.25]


async def test_attempts_run_out_with_the_last_failure_as_cause() -> None:
    time = Time()
    failures = [TransientError(f"busy {at}", uri="gs://b/k", status=503) for at in range(4)]
    attempt, numbers = failing(*failures)
    with pytest.raises(TransientError, match=r"busy 3.*4 attempts.*RetryPolicy") as raised:
        await with_retry(attempt, POLICY, clock=time.clock, sleep=time.sleep)
    assert numbers == [1, 2, 3, 4]
    assert raised.value.__cause__ is failures[3]
    assert (raised.value.uri, raised.value.status) == ("gs://b/k", 503)


async def test_three_malformed_answers_in_a_row_end_the_attempts() -> None:
    time = Time()
    bad = [TransientError(f"not HTTP {at}", is_malformed=True) for at in range(5)]
    attempt, numbers = failing(*bad[:2], TransientError("busy"), *bad[2:])
    policy = RetryPolicy(max_attempts=20)
    with pytest.raises(TransientError, match=r"not HTTP 4.*malformed") as raised:
        await with_retry(attempt, policy, clock=time.clock, sleep=time.sleep)
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert raised.value.is_malformed
    assert "RetryPolicy" not in str(raised.value)


async def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    time = Time()
    attempt, numbers = failing(TransientError("busy", retry_after_seconds=1e6))
    says = r"asked to wait 1e\+06 s, .* deadline of 300 s; RetryPolicy.deadline_seconds"
    with pytest.raises(TransientError, match=says):
        await with_retry(attempt, POLICY, clock=time.clock, sleep=time.sleep)
    assert numbers == [1]
    assert time.slept == []


async def test_other_failures_are_not_sent_again() -> None:
    attempt, numbers = failing(NotFoundError("none"))
    with pytest.raises(NotFoundError, match="none"):
        await with_retry(attempt, POLICY)
    assert numbers == [1]


@pytest.mark.usefixtures("clock")
async def test_the_deadline_ends_an_attempt_under_way_and_names_the_object() -> None:
    async def attempt(_: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TransientError, match="gs://b/slow") as raised:
        await with_retry(
            attempt,
            RetryPolicy(deadline_seconds=0.01),
            uri_of=lambda: "gs://b/slow",
            clock=loop_time,
        )
    assert raised.value.uri == "gs://b/slow"
    assert isinstance(raised.value.__cause__, TransientError)


@pytest.mark.usefixtures("clock")
async def test_the_deadline_reports_the_last_failure_where_there_was_one() -> None:
    async def attempt(number: int) -> None:
        if number == 1:
            raise TransientError("busy", uri="gs://b/k")
        await asyncio.Event().wait()

    policy = RetryPolicy(initial_seconds=1e-6, max_seconds=1e-6, deadline_seconds=0.02)
    with pytest.raises(TransientError, match=r"busy.*2 attempts"):
        await with_retry(attempt, policy, clock=loop_time)


async def test_a_timeout_of_another_client_is_not_the_deadline() -> None:
    attempt, _ = failing(TimeoutError("somebody else's"))
    with pytest.raises(TimeoutError, match="somebody else's"):
        await with_retry(attempt, POLICY, clock=loop_time)


async def test_cancellation_is_never_swallowed() -> None:
    begun = asyncio.Event()

    async def attempt(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(with_retry(attempt, POLICY, clock=loop_time))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_budget_lets_a_burst_through_and_then_so_many_a_second() -> None:
    budget = RetryBudget(burst=3, per_second=10)
    assert [budget.try_acquire(5.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.1])
    assert budget.try_acquire(5.05) == pytest.approx(0.05)
    assert budget.try_acquire(5.101) == 0


def test_time_fills_the_budget_up_to_the_burst() -> None:
    budget = RetryBudget(burst=2, per_second=10)
    for _ in range(4):
        budget.try_acquire(0.0)
    assert [budget.try_acquire(100.0) for _ in range(3)] == pytest.approx([0, 0, 0.1])


def test_five_successes_allow_one_retry() -> None:
    budget = RetryBudget(burst=1, per_second=1e-9)
    budget.try_acquire(0.0)
    for _ in range(4):
        budget.on_success()
    assert budget.try_acquire(0.0) > 1e6
    budget.on_success()
    assert budget.try_acquire(0.0) == 0


def test_a_retry_that_succeeds_gives_back_what_it_took() -> None:
    """A service that is back is not asked more slowly for what it missed."""
    budget = RetryBudget(burst=3, per_second=1e-9)
    for _ in range(1000):
        assert budget.try_acquire(0.0) == 0
        budget.on_success(was_retry=True)


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 20), st.integers(0, 50), st.booleans()),
        max_size=30,
    )
)
def test_no_more_retries_than_burst_time_and_successes_allow(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    budget, now, allowed, num_sent = RetryBudget(burst=5, per_second=2), 0.0, 5.0, 0
    budget.try_acquire(now)
    num_sent += 1
    for pause, num_retries, num_successes, was_retry in steps:
        now += pause
        for _ in range(num_successes):
            budget.on_success(was_retry=was_retry)
        allowed += num_successes * (0.2 + was_retry)
        num_sent += sum(budget.try_acquire(now) == 0 for _ in range(num_retries))
        assert num_sent <= allowed + 2 * now + 1e-6


async def test_a_retry_above_the_budget_waits_for_it() -> None:
    time, budget = Time(), RetryBudget(burst=1, per_second=0.1)
    budget.try_acquire(time.clock())
    attempt, numbers = failing(TransientError("again"))
    await with_retry(
        attempt, POLICY, budget=budget, clock=time.clock, sleep=time.sleep, jitter=lambda: 0.0
    )
    assert numbers == [1, 2]
    assert sum(time.slept) == pytest.approx(10.0, abs=2.0)
    assert max(time.slept) <= 2.0  # a success of another request may let it pass earlier


async def test_a_budget_that_stays_empty_ends_with_the_deadline(clock: Clock) -> None:
    budget = RetryBudget(burst=1, per_second=1e-6)
    budget.try_acquire(clock.now)
    policy = RetryPolicy(initial_seconds=1e-6, max_seconds=1e-6, deadline_seconds=0.2)

    async def attempt(_: int) -> None:
        raise TransientError("again", status=503)

    with pytest.raises(TransientError, match="gave up after 1 attempts") as caught:
        await with_retry(attempt, policy, clock=loop_time, budget=budget)
    assert caught.value.status == 503


async def test_who_is_cancelled_while_it_waits_for_the_budget_owes_nothing(clock: Clock) -> None:
    budget = RetryBudget(burst=1, per_second=1e-6)
    budget.try_acquire(clock.now)
    policy = RetryPolicy(initial_seconds=1e-6, max_seconds=1e-6)

    async def attempt(_: int) -> None:
        raise TransientError("again")

    tasks = [
        asyncio.create_task(with_retry(attempt, policy, clock=loop_time, budget=budget))
        for _ in range(50)
    ]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    budget.on_success(was_retry=True)
    assert budget.try_acquire(clock.now) == 0
