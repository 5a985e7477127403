"""Sending a request again: the schedule, the decision, and the short loop that uses them.

`with_retry` is over 60 lines by its parameters and what is said of them; it decides nothing itself.
"""

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

__all__ = ["Backoff", "RetryBudget", "backoff_bound", "moved", "next_delay", "with_retry"]

T = TypeVar("T")

_log = logging.getLogger("aioflux.retry")
"""Tells of each retry, at the level INFO."""

_RETRIES_PER_SUCCESS = 0.2
"""Share of successful requests that may be followed by a retry, for ever: the ratio of Finagle's
RetryBudget (twitter.github.io/finagle/guide/Clients.html)."""

_MAX_MALFORMED = 3
"""Malformed answers to consecutive attempts, the last of which is final. One is damage on the way.
Three come from a server that is not the service, such as a web server that `endpoint_url` names by
mistake, and the caller should hear of it at once."""

_MIN_TRIES = 3
"""Tries of what was replaced meanwhile, also where the policy has fewer attempts: the service has
answered each of them."""

_MAX_PAUSE_SECONDS = 2.0
"""Time between two looks at an empty budget, at most; up to as much again at random."""

_jitter: Final = random.SystemRandom().random
"""Not that of `random`, whose numbers are the program's: a run that is repeated draws the same."""


class RetryBudget:
    """How many retries all requests of one store may send: a token bucket.

    It holds `burst` retries and is filled by time and by every success; a retry that succeeds gives
    back what it took. One that finds it empty waits and asks again: while a service is down, the
    requests of a store together ask it `per_second` times a second, and all go on when it is back.

    Args:
        burst: Retries that may follow each other at once.
        per_second: Retries in each second, whatever else happens.
    """

    def __init__(self, *, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def succeeded(self, *, was_retry: bool = False) -> None:
        """Fill in what one successful request is worth."""
        if self._tokens < self._burst:
            self._tokens = min(self._burst, self._tokens + _RETRIES_PER_SUCCESS + was_retry)

    def take(self, now: float) -> float:
        """Take one retry if there is one.

        Args:
            now: Time in seconds, from any beginning, never earlier than before.

        Returns:
            0 where the retry may be sent now; otherwise none was taken, and it is the seconds until
            there is one, should nobody else take it.
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
    """Decide what follows a failed attempt.

    Args:
        attempt: Number of the attempt that failed, from 1.
        policy: The limits.
        elapsed_seconds: Time since the first attempt began.
        retry_after_seconds: The wait that the service asked for, or None.
        fraction: A random number in `[0, 1)`: full jitter (Brooker, "Exponential Backoff And
            Jitter", 2015).

    Returns:
        Seconds to wait before the next attempt, or None where there must be none.
    """
    if attempt >= policy.max_attempts:
        return None
    delay = fraction * backoff_bound(attempt, policy)
    if retry_after_seconds is not None:
        # A little jitter on top, so that those who were told the same time do not come back as one.
        delay += retry_after_seconds
    return delay if elapsed_seconds + delay < policy.deadline_seconds else None


class Backoff:
    """Pauses between tries that each began anew because others had replaced the object.

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
        self._begun = self._clock()

    async def pause(self) -> bool:
        """Wait before the next try; return False, without a wait, if there must be none."""
        self.num_tries += 1
        most = max(self._policy.max_attempts, _MIN_TRIES)
        delay = next_delay(
            self.num_tries,
            replace(self._policy, max_attempts=most),
            elapsed_seconds=self._clock() - self._begun,
            retry_after_seconds=None,
            fraction=_jitter(),
        )
        if delay is None:
            return False
        await asyncio.sleep(delay)
        return True


def moved(error: TransientError) -> bool:
    """Tell whether a failed attempt brought bytes from which the next one goes on."""
    return error.num_bytes_received > 0 and error.generation != ""


async def _wait_for(
    budget: RetryBudget,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
    jitter: Callable[[], float],
) -> None:
    """Wait until the budget has a retry; thousands may, so that nobody asks often."""
    pause = 0.0
    while (wait := budget.take(clock())) > 0:
        pause = min(max(2 * pause, wait), _MAX_PAUSE_SECONDS)
        await sleep(pause * (1 + jitter()))


async def with_retry(
    attempt: Callable[[int], Awaitable[T]],
    policy: RetryPolicy,
    *,
    after: TransientError | None = None,
    begun: float | None = None,
    uri_of: Callable[[], str] = str,
    budget: RetryBudget | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    jitter: Callable[[], float] = _jitter,
) -> T:
    """Run `attempt(number)` until it succeeds, fails for good, or the policy ends.

    Args:
        attempt: One attempt; it is given its number, from 1. A TransientError asks for another.
        policy: The limits. The deadline also ends an attempt that is under way. An attempt that
            moved bytes of a body does not count: attempts and delays begin anew after it.
        after: How the first attempt failed, which the caller has made: the second comes next.
        begun: When that was begun, on `clock`; now by default.
        uri_of: Tells what is asked for, should the deadline pass before any attempt ended.
        budget: What all requests of a store share; none by default.
        clock: Time in seconds, from any beginning.
        sleep: Waits for so many seconds.
        jitter: Random numbers in `[0, 1)`.

    Raises:
        TransientError: Attempts or time ran out; `__cause__` is the last failure.
    """
    now = clock()
    begun = now if begun is None else begun
    number = 1
    num_in_vain = num_malformed = 0
    last, failure = after, after
    try:
        async with asyncio.timeout(begun + policy.deadline_seconds - now) as deadline:
            while True:
                try:
                    if failure is None:
                        return await attempt(number)
                    raise failure
                except TransientError as exc:
                    last, failure = exc, None
                    now = clock()
                    # Over a line that breaks every few megabytes a large range still arrives: what
                    # came is kept, and only the deadline ends that.
                    num_in_vain = 1 if moved(exc) else num_in_vain + 1
                    num_malformed = num_malformed + 1 if exc.is_malformed else 0
                    delay = next_delay(
                        num_in_vain,
                        policy,
                        elapsed_seconds=now - begun,
                        retry_after_seconds=exc.retry_after_seconds,
                        fraction=jitter(),
                    )
                    if delay is None or num_malformed >= _MAX_MALFORMED:
                        break
                _log.info(
                    "attempt %d failed, the next one comes in %.1f s: %s",
                    number,
                    delay,
                    last,
                    extra={"elapsed_seconds": now - begun + delay},
                )
                await sleep(delay)
                if budget is not None:
                    await _wait_for(budget, clock, sleep, jitter)
                number += 1
    except TimeoutError as exc:
        if not deadline.expired():
            raise
        if last is None:
            uri = uri_of()
            last = TransientError(f"no answer about {uri} came before the deadline", uri=uri)
            last.__cause__ = exc
    elapsed = clock() - begun
    why = f"gave up after {number} attempts in {elapsed:.1f} s; RetryPolicy sets both"
    asked = last.retry_after_seconds
    if asked is not None and elapsed + asked >= policy.deadline_seconds:
        why = (
            f"the service asked to wait {asked:g} s, which is beyond the deadline of "
            f"{policy.deadline_seconds:g} s; RetryPolicy.deadline_seconds sets it"
        )
    elif num_malformed >= _MAX_MALFORMED:
        why = f"the last {num_malformed} answers were malformed"
    raise TransientError(
        f"{last} ({why})",
        uri=last.uri,
        status=last.status,
        retry_after_seconds=last.retry_after_seconds,
        num_bytes_received=last.num_bytes_received,
        is_malformed=last.is_malformed,
    ) from last
