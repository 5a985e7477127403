"""Retries of one request: the schedule, the budget, and the loop that uses them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux.errors import TransientError

if TYPE_CHECKING:
    from aioflux._transfer.admission import RetryBudget
    from aioflux.options import RetryPolicy

T = TypeVar("T")

_log = logging.getLogger("aioflux.retry")
"""Logs retries at the level INFO, those that are only counted there at DEBUG, and at WARNING that a
store has no connection."""

_WARNING_SECONDS = 1.0
_MAX_UNKNOWN_HOST = 3

_MAX_MALFORMED = 3
"""Consecutive malformed responses after which a request is not retried. One malformed response is
damage in transit. Three come from another server than the service, such as a web server that was
configured as `endpoint_url` by mistake."""

_MIN_TRIES = 3
"""Fewest tries of an operation on an object that other writers replace, even if the policy has
fewer attempts. The service responded to each of these tries, so they do not show that it is
down."""

_MAX_PAUSE_SECONDS = 2.0
"""Longest pause between two checks of an empty retry budget. Jitter adds up to as much again."""

_jitter: Final = random.SystemRandom().random
"""A separate random source: drawing from the module `random` would change the results of a caller's
program that seeds it."""


def backoff_bound(attempt: int, policy: RetryPolicy) -> float:
    """Return the largest wait after failed attempt `attempt` (from 1), in seconds."""
    # The exponent is at most 64: by then the bound is max_seconds in any sensible policy, and a
    # very large exponent would overflow.
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
    """Return the seconds to wait before the next attempt, or None if no attempt may follow.

    Args:
        attempt: Number of the failed attempt, from 1.
        policy: The limits.
        elapsed_seconds: Time since the start of the first attempt.
        retry_after_seconds: The Retry-After of the response in seconds, or None.
        fraction: A random number in `[0, 1)`: full jitter (Brooker, "Exponential Backoff And
            Jitter", 2015).
    """
    if attempt >= policy.max_attempts:
        return None
    delay = fraction * backoff_bound(attempt, policy)
    if retry_after_seconds is not None:
        # Plus jitter, so that clients with the same Retry-After do not retry at the same time.
        delay += retry_after_seconds
    return delay if elapsed_seconds + delay < policy.deadline_seconds else None


class Backoff:
    """Pauses between tries of an operation on an object that other writers replace.

    The pauses are as long as those between the attempts of a request. The limits are the same, but
    `max_attempts` counts as at least `_MIN_TRIES`.

    Args:
        policy: The limits.

    Attributes:
        num_tries: Number of tries that have failed so far.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self.num_tries = 0
        self._policy = policy
        self._clock = asyncio.get_running_loop().time
        self._started_at = self._clock()

    async def pause(self) -> bool:
        """Wait before the next try. If no further try is allowed, return False at once."""
        self.num_tries += 1
        max_attempts = max(self._policy.max_attempts, _MIN_TRIES)
        delay = next_delay(
            self.num_tries,
            replace(self._policy, max_attempts=max_attempts),
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
        last: Failure of the last attempt.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self.last: TransientError | None = None
        self._policy = policy
        self._num_without_progress = 0
        self._num_malformed = 0
        self._num_unconnected = 0
        self._num_unknown_host = 0
        self._has_connected = False

    def add(self, error: TransientError) -> None:
        self.last = error
        if error.unconnected and self._policy.max_attempts > 1:
            self._num_unconnected += 1
            self._num_unknown_host += error.unconnected == "unknown host"
            return
        self._has_connected, self._num_unconnected, self._num_unknown_host = True, 0, 0
        # An attempt whose bytes are kept resets the count, so that a large range is received even
        # if the connection breaks every few megabytes. The deadline limits such attempts.
        made_progress = error.num_bytes_received > 0 and error.generation != ""
        self._num_without_progress = 1 if made_progress else self._num_without_progress + 1
        self._num_malformed = self._num_malformed + 1 if error.is_malformed else 0

    @property
    def deadline_seconds(self) -> float:
        """The limit of the time for all attempts."""
        policy = self._policy
        if self._has_connected or policy.connect_deadline_seconds is None:
            return policy.deadline_seconds
        return min(policy.deadline_seconds, policy.connect_deadline_seconds)

    def next_delay(self, elapsed_seconds: float, fraction: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None if no attempt may follow."""
        assert self.last is not None
        if self._num_malformed >= _MAX_MALFORMED or self._num_unknown_host >= _MAX_UNKNOWN_HOST:
            return None
        if self._num_unconnected:
            num_seconds_left = self.deadline_seconds - elapsed_seconds
            delay = fraction * backoff_bound(self._num_unconnected, self._policy)
            return min(delay, num_seconds_left) if num_seconds_left > 0 else None
        return next_delay(
            self._num_without_progress,
            self._policy,
            elapsed_seconds=elapsed_seconds,
            retry_after_seconds=self.last.retry_after_seconds,
            fraction=fraction,
        )

    def final_error(self, num_attempts: int, elapsed_seconds: float) -> TransientError:
        """Return the error of a request that is not retried any more."""
        last, deadline_seconds = self.last, self._policy.deadline_seconds
        assert last is not None
        retry_after = last.retry_after_seconds
        reason = f"gave up after {num_attempts} attempts in {elapsed_seconds:.1f} s; "
        reason += "RetryPolicy.max_attempts and RetryPolicy.deadline_seconds set the limits"
        if retry_after is not None and elapsed_seconds + retry_after >= deadline_seconds:
            reason = (
                f"the service asked to wait {retry_after:g} s, which is beyond the deadline of "
                f"{deadline_seconds:g} s; RetryPolicy.deadline_seconds sets it"
            )
        elif self._num_malformed >= _MAX_MALFORMED:
            reason = f"the last {self._num_malformed} responses were malformed"
        elif self._num_unknown_host >= _MAX_UNKNOWN_HOST:
            reason = f"the name was not found {num_attempts} times in a row; check its spelling"
        elif last.unconnected and not self._has_connected:
            reason = f"gave up after {num_attempts} attempts in {elapsed_seconds:.1f} s; "
            reason += "RetryPolicy.connect_deadline_seconds sets the limit"
        error = TransientError(
            f"{last} ({reason})",
            uri=last.uri,
            status=last.status,
            retry_after_seconds=last.retry_after_seconds,
            num_bytes_received=last.num_bytes_received,
            is_malformed=last.is_malformed,
            unconnected=last.unconnected,
        )
        error.__cause__ = last
        return error


def _log_retry(
    log: Callable[..., None], number: int, error: TransientError, delay: float, elapsed: float
) -> None:
    log(
        "attempt %d failed, next attempt in %.1f s: %s",
        number,
        delay,
        error,
        extra={"elapsed_seconds": elapsed + delay},
    )


def _warn_if_unconnected(failures: _Failures, budget: RetryBudget, elapsed: float) -> None:
    """Log a warning, once for the store, if a request has had no connection for a second."""
    if elapsed >= _WARNING_SECONDS and not budget.has_warned:
        budget.has_warned = True
        seconds = failures.deadline_seconds - elapsed
        _log.warning("%s; trying again for up to %.0f s", failures.last, seconds)


async def _wait_for_budget(
    budget: RetryBudget,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
    jitter: Callable[[], float],
) -> None:
    """Acquire a retry from the budget, with growing pauses: thousands of requests may wait."""
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
    count: Callable[[TransientError], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    jitter: Callable[[], float] = _jitter,
) -> T:
    """Run `attempt(number)` until it succeeds, fails with a final error, or reaches a limit.

    Args:
        attempt: Makes one attempt, given its number, from 1. After a TransientError it is called
            again.
        policy: The limits. At the deadline the current attempt is cancelled. An attempt whose bytes
            are kept resets the count of attempts and the delays.
        after: Failure of the first attempt, if the caller has made it.
        started_at: Start of the first attempt, on `clock`; now by default.
        uri_of: Returns the uri for the error, if the deadline passes during the first attempt.
        budget: Retry budget of the store; unlimited by default.
        count: Counts a retry for a line of counts, and returns whether it is the first of its
            cause, to be logged at once. By default each retry is.
        clock: Returns the monotonic time in seconds.
        sleep: Waits for a number of seconds.
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
                    log = _log.info if count is None or count(failures.last) else _log.debug
                    _log_retry(log, number, failures.last, delay, elapsed)
                    if failures.last.unconnected and budget is not None and not budget.has_warned:
                        pause = min(delay, max(0.0, _WARNING_SECONDS - elapsed))
                        await sleep(pause)
                        delay, elapsed = delay - pause, elapsed + pause
                        _warn_if_unconnected(failures, budget, elapsed)
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
