"""Retries of one request: the schedule, the budget, and the loop that uses them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux.options import RetryPolicy

__all__ = ["Backoff", "RetryBudget", "backoff_bound", "next_delay", "with_retry"]

T = TypeVar("T")

_log = logging.getLogger("aioflux.retry")
"""Logs each retry, at the level INFO."""

_RETRIES_PER_SUCCESS = 0.2
"""Retries that each successful request allows: the ratio of Finagle's RetryBudget
(twitter.github.io/finagle/guide/Clients.html)."""

_MAX_MALFORMED = 3
"""Malformed responses to consecutive attempts, the last of which is final. One is damage in
transit. Three come from a server that is not the service, such as a web server that `endpoint_url`
names by mistake, which the caller should learn at once."""

_MIN_TRIES = 3
"""Tries of an operation on an object that others replace, even if the policy has fewer attempts:
each of them got a response."""

_MAX_PAUSE_SECONDS = 2.0
"""Longest wait between two looks at an empty budget; up to as much again at random."""

_jitter: Final = random.SystemRandom().random
"""Not that of `random`, whose sequence belongs to the program: a repeated run draws the same."""


class RetryBudget:
    """A token bucket of the retries that all requests of one store may send.

    It holds `burst` retries and is filled by time and by every success; a retry that succeeds
    returns its token. A retry that finds the bucket empty waits and tries again: while a service is
    down, the requests of a store together send `per_second` retries a second.

    Args:
        burst: Retries that may follow each other at once.
        per_second: Retries in each second, whatever else happens.
    """

    def __init__(self, *, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def on_success(self, *, was_retry: bool = False) -> None:
        """Add what one successful request is worth."""
        if self._tokens < self._burst:
            self._tokens = min(self._burst, self._tokens + _RETRIES_PER_SUCCESS + was_retry)

    def try_acquire(self, now: float) -> float:
        """Acquire one retry if there is one.

        Args:
            now: Time in seconds, from any beginning, never earlier than before.

        Returns:
            0 if the retry may be sent now; otherwise none was acquired, and it is the seconds until
            there is one, unless another request acquires it.
        """
        if self._filled_at is not None:
            filled = self._tokens + (now - self._filled_at) * self._per_second
            self._tokens = min(self._burst, filled)
        self._filled_at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._per_second
        self._tokens -= 1
        return 0.0


def backoff_bound(attempt: int, policy: RetryPolicy) -> float:
    """Return the largest wait after failed attempt `attempt` (from 1), in seconds."""
    # Past 64 doublings the bound is max_seconds for any sensible policy, and the power would
    # overflow.
    growth = policy.multiplier ** min(attempt - 1, 64)
    return min(policy.initial_seconds * growth, policy.max_seconds)


def next_delay(
    attempt: int,
    policy: RetryPolicy,
    *,
    elapsed_seconds: float,
    retry_after_seconds: float | None,
    fraction: float,
) -> float | None:
    """Return the seconds to wait before the next attempt, or None if there must be none.

    Args:
        attempt: Number of the failed attempt, from 1.
        policy: The limits.
        elapsed_seconds: Time since the start of the first attempt.
        retry_after_seconds: The wait that the service asked for, or None.
        fraction: A random number in `[0, 1)`: full jitter (Brooker, "Exponential Backoff And
            Jitter", 2015).
    """
    if attempt >= policy.max_attempts:
        return None
    delay = fraction * backoff_bound(attempt, policy)
    if retry_after_seconds is not None:
        # A little jitter on top, so that clients with the same Retry-After do not return as one.
        delay += retry_after_seconds
    return delay if elapsed_seconds + delay < policy.deadline_seconds else None


class Backoff:
    """Pauses between tries of an operation that starts anew because others replaced the object.

    They are those of a `RetryPolicy` between attempts, and end with its attempts or its deadline.

    Args:
        policy: The limits.

    Attributes:
        num_tries: Tries that have failed so far.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self.num_tries = 0
        self._policy = policy
        self._clock = asyncio.get_running_loop().time
        self._started_at = self._clock()

    async def pause(self) -> bool:
        """Wait before the next try; return False, without a wait, if there must be none."""
        self.num_tries += 1
        most = max(self._policy.max_attempts, _MIN_TRIES)
        delay = next_delay(
            self.num_tries,
            replace(self._policy, max_attempts=most),
            elapsed_seconds=self._clock() - self._started_at,
            retry_after_seconds=None,
            fraction=_jitter(),
        )
        if delay is None:
            return False
        await asyncio.sleep(delay)
        return True


class _Failures:
    """Failed attempts of one request.

    Attributes:
        last: The last of them.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self.last: TransientError | None = None
        self._policy = policy
        self._num_in_vain = 0
        self._num_malformed = 0

    def add(self, error: TransientError) -> None:
        self.last = error
        # Over a connection that breaks every few megabytes a large range still arrives: an attempt
        # that brought bytes to resume from does not count, and only the deadline ends that.
        made_progress = error.num_bytes_received > 0 and error.generation != ""
        self._num_in_vain = 1 if made_progress else self._num_in_vain + 1
        self._num_malformed = self._num_malformed + 1 if error.is_malformed else 0

    def next_delay(self, elapsed_seconds: float, fraction: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there must be none."""
        assert self.last is not None
        if self._num_malformed >= _MAX_MALFORMED:
            return None
        return next_delay(
            self._num_in_vain,
            self._policy,
            elapsed_seconds=elapsed_seconds,
            retry_after_seconds=self.last.retry_after_seconds,
            fraction=fraction,
        )

    def final_error(self, num_attempts: int, elapsed_seconds: float) -> TransientError:
        """Return the error of a request that is not attempted again."""
        last, deadline_seconds = self.last, self._policy.deadline_seconds
        assert last is not None
        asked = last.retry_after_seconds
        reason = f"gave up after {num_attempts} attempts in {elapsed_seconds:.1f} s; "
        reason += "RetryPolicy sets both"
        if asked is not None and elapsed_seconds + asked >= deadline_seconds:
            reason = (
                f"the service asked to wait {asked:g} s, which is beyond the deadline of "
                f"{deadline_seconds:g} s; RetryPolicy.deadline_seconds sets it"
            )
        elif self._num_malformed >= _MAX_MALFORMED:
            reason = f"the last {self._num_malformed} responses were malformed"
        error = TransientError(
            f"{last} ({reason})",
            uri=last.uri,
            status=last.status,
            retry_after_seconds=last.retry_after_seconds,
            num_bytes_received=last.num_bytes_received,
            is_malformed=last.is_malformed,
        )
        error.__cause__ = last
        return error


def _log_retry(number: int, error: TransientError, delay: float, elapsed: float) -> None:
    _log.info(
        "attempt %d failed, the next one comes in %.1f s: %s",
        number,
        delay,
        error,
        extra={"elapsed_seconds": elapsed + delay},
    )


async def _wait_for_budget(
    budget: RetryBudget,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
    jitter: Callable[[], float],
) -> None:
    """Wait until the budget has a retry; thousands of requests may, so that each looks seldom."""
    pause = 0.0
    while (wait := budget.try_acquire(clock())) > 0:
        pause = min(max(2 * pause, wait), _MAX_PAUSE_SECONDS)
        await sleep(pause * (1 + jitter()))


async def with_retry(
    attempt: Callable[[int], Awaitable[T]],
    policy: RetryPolicy,
    *,
    after: TransientError | None = None,
    started_at: float | None = None,
    uri_of: Callable[[], str] = str,
    budget: RetryBudget | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    jitter: Callable[[], float] = _jitter,
) -> T:
    """Run `attempt(number)` until it succeeds, fails for good, or the policy ends.

    Args:
        attempt: Makes one attempt, given its number, from 1. A TransientError asks for another.
        policy: The limits. The deadline also ends an attempt that is under way. An attempt that
            brought bytes to resume from does not count: attempts and delays begin anew after it.
        after: Failure of the first attempt, if the caller has made it.
        started_at: Start of the first attempt, on `clock`; now by default.
        uri_of: Returns the uri for an error, if the deadline passes before any attempt ended.
        budget: Retries of all requests of a store; unlimited by default.
        clock: Returns the time in seconds, from any beginning.
        sleep: Waits for so many seconds.
        jitter: Returns random numbers in `[0, 1)`.

    Raises:
        TransientError: Attempts or time ran out; `__cause__` is the last failure.
    """
    now = clock()
    started_at = now if started_at is None else started_at
    failures, number = _Failures(policy), 1
    if after is not None:
        failures.add(after)
    try:
        async with asyncio.timeout(started_at + policy.deadline_seconds - now) as deadline:
            while True:
                if failures.last is not None:
                    elapsed = clock() - started_at
                    delay = failures.next_delay(elapsed, jitter())
                    if delay is None:
                        break
                    _log_retry(number, failures.last, delay, elapsed)
                    await sleep(delay)
                    if budget is not None:
                        await _wait_for_budget(budget, clock, sleep, jitter)
                    number += 1
                try:
                    return await attempt(number)
                except TransientError as exc:
                    failures.add(exc)
    except TimeoutError as exc:
        if not deadline.expired():
            raise
        if failures.last is None:
            uri = uri_of()
            message = f"no response for {uri} came before the deadline"
            failures.last = TransientError(message, uri=uri)
            failures.last.__cause__ = exc
    raise failures.final_error(number, clock() - started_at)
