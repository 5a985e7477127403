"""When a failed request is sent again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import NotFoundError, RetryPolicy, TransientError
from aioflux.transfer._retry import backoff_bound, next_delay, with_retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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


async def test_the_service_is_given_the_time_that_it_asked_for() -> None:
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


async def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    time = Time()
    attempt, numbers = failing(TransientError("busy", retry_after_seconds=1e6))
    with pytest.raises(TransientError, match="1 attempts"):
        await with_retry(attempt, POLICY, clock=time.clock, sleep=time.sleep)
    assert numbers == [1]
    assert time.slept == []


async def test_other_failures_are_not_sent_again() -> None:
    attempt, numbers = failing(NotFoundError("none"))
    with pytest.raises(NotFoundError, match="none"):
        await with_retry(attempt, POLICY)
    assert numbers == [1]


async def test_the_deadline_ends_an_attempt_under_way_and_names_the_object() -> None:
    async def attempt(_: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TransientError, match="gs://b/slow") as raised:
        await with_retry(attempt, RetryPolicy(deadline_seconds=0.01), uri_of=lambda: "gs://b/slow")
    assert raised.value.uri == "gs://b/slow"
    assert isinstance(raised.value.__cause__, TransientError)


async def test_the_deadline_tells_the_last_failure_where_there_was_one() -> None:
    async def attempt(number: int) -> None:
        if number == 1:
            raise TransientError("busy", uri="gs://b/k")
        await asyncio.Event().wait()

    policy = RetryPolicy(initial_seconds=1e-6, max_seconds=1e-6, deadline_seconds=0.02)
    with pytest.raises(TransientError, match=r"busy.*2 attempts"):
        await with_retry(attempt, policy)


async def test_a_timeout_of_somebody_else_is_not_the_deadline() -> None:
    attempt, _ = failing(TimeoutError("somebody else's"))
    with pytest.raises(TimeoutError, match="somebody else's"):
        await with_retry(attempt, POLICY)


async def test_cancellation_is_never_swallowed() -> None:
    begun = asyncio.Event()

    async def attempt(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(with_retry(attempt, POLICY))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
