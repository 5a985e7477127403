"""Admission of requests: how many may be in flight, with how many bytes, how often and how long.

Over 500 lines because all that decides whether a request may start is here, and the counters, which
learn from its end.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Protocol

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._concurrency.fork_safe_lock import ForkSafeLock
from aioflux._http import ConnectionLostError, StalledError
from aioflux._values.stats import LATENCY_BOUNDS_SECONDS, LatencyHistogram, StoreStats
from aioflux._values.uri import join_uri
from aioflux.errors import TransientError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aioflux.options import RetryPolicy

_GROWTH = 1 / 8
"""Growth of a limit of 8 or more after each success: a limit that was halved from 64 to 32 is 64
again after 256 successes."""
THROTTLED = frozenset({429, 503})
"""Statuses of throttled requests."""
_REQUESTS_PER_SECOND: Final = 5000
"""Reads per second that a bucket serves at first: 5,000 objects (Cloud Storage, "Request rate and
access distribution guidelines"), 5,500 for each prefix (S3, "Optimizing performance")."""
_FEW_RANKS: Final = 64
_RETRIES_PER_SUCCESS = 0.2
"""Retries that each successful request allows: the ratio of Finagle's RetryBudget
(twitter.github.io/finagle/guide/Clients.html)."""


def plan_start(max_in_flight: int, world_size: int, fraction: float) -> tuple[int, float]:
    """Return the first limit of a store, and the seconds before its first request.

    In large jobs the limit is a share of the requests of a second, but at least 8, so that large
    parts of an upload do not delay the polls of other ranks. The delay is 0 to 1.6 s for 8,000
    ranks, by `fraction`, a random number in `[0, 1)`.
    """
    if world_size <= _FEW_RANKS:
        return max_in_flight, 0.0
    share = max(8, _REQUESTS_PER_SECOND // world_size)
    return min(max_in_flight, share), fraction * world_size / _REQUESTS_PER_SECOND


class SlotWaiter(Protocol):
    """A waiter for a request slot: the future of a task, or an object with callbacks."""

    def cancelled(self) -> bool:
        """Return whether the waiter was cancelled. A cancelled waiter calls `remove_waiter`."""

    def set_result(self, result: None, /) -> None:
        """Continue with a slot, which was acquired for this waiter."""


class TokenBucket:
    """Tokens, of which time adds `per_second`, up to `most`. `tokens` can be acquired now."""

    def __init__(self, most: float, per_second: float, tokens: float) -> None:
        self.most = most
        self.tokens = tokens
        self._per_second = per_second
        self._filled_at: float | None = None

    def try_acquire(self, now: float) -> float:
        """Acquire a token, if there is one.

        Args:
            now: Monotonic time in seconds.

        Returns:
            0 if a token was acquired. Otherwise the seconds until there is a token, unless another
            request acquires it first.
        """
        if self._filled_at is not None:
            filled = self.tokens + (now - self._filled_at) * self._per_second
            self.tokens = min(self.most, filled)
        self._filled_at = now
        if self.tokens < 1 - 1e-9:  # a timer may fire that much early
            return (1 - self.tokens) / self._per_second
        self.tokens -= 1
        return 0.0


class RequestRate(TokenBucket):
    """The attempts that a store may send: the tokens of 0.1 s, or one token.

    It starts with a share `fraction` of them, a random number in `[0, 1)`, so that the first
    requests of many processes are spread over time.
    """

    def __init__(self, per_second: float, *, fraction: float) -> None:
        most = max(1.0, per_second / 10)
        super().__init__(most, per_second, most * fraction)

    def restore(self) -> None:
        """Return the token of a request that was not sent."""
        self.tokens += 1


class RetryBudget(TokenBucket):
    """The retries that all requests of one store may send.

    A retry removes one token. Time and successful requests add tokens, and a successful retry
    returns its own. If the bucket is empty, a retry waits: while a service is down, all requests of
    a store send `per_second` retries per second in total.

    Args:
        burst: Retries that may be sent without a pause.
        per_second: Retries that may be sent per second, even if no request succeeds.

    Attributes:
        has_warned: The store has logged that it has no connection, and no retry succeeded since.
    """

    def __init__(self, *, burst: float, per_second: float) -> None:
        super().__init__(burst, per_second, float(burst))
        self.has_warned = False

    def on_success(self, *, was_retry: bool = False) -> None:
        """Add a fifth of a token, and one more token if the successful request was a retry."""
        if was_retry:
            self.has_warned = False
        if self.tokens < self.most:
            self.tokens = min(self.most, self.tokens + _RETRIES_PER_SUCCESS + was_retry)


class AdaptiveLimit:
    """A semaphore of request slots, with fewer slots while the service throttles.

    The limit is halved when the service throttles a request that was sent after the limit was last
    halved, and grows again with every success: additive increase, multiplicative decrease (Chiu and
    Jain, "Analysis of the Increase and Decrease Algorithms", 1989).

    Attributes:
        num_cuts: Number of times that the limit was halved.
        rate: Gives a token for each slot that is acquired; None for no limit of the rate.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.num_cuts = 0
        self._max = max_in_flight
        self._limit = float(max_in_flight)
        self._held = 0
        self._waiters: deque[SlotWaiter] = deque()
        self._is_waking = False
        self.rate: RequestRate | None = None
        self._rate_timer: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int:
        """Current number of slots."""
        return int(self._limit)

    @property
    def num_held(self) -> int:
        """Number of slots in use."""
        return self._held

    def try_acquire(self, *, in_front: bool = False) -> bool:
        """Acquire a slot; return False if none is free, or the rate allows no request now.

        Also return False if other requests wait for a slot, unless `in_front` is set.

        Args:
            in_front: Do not let requests that wait go first.
        """
        if self._held >= int(self._limit) or (self._waiters and not in_front):
            return False
        if self.rate is not None:
            loop = asyncio.get_running_loop()
            if wait := self.rate.try_acquire(loop.time()):
                if self._rate_timer is None:
                    self._rate_timer = loop.call_later(wait, self._on_rate_timer)
                return False
        self._held += 1
        return True

    async def acquire(self, *, in_front: bool = False) -> None:
        """Wait for a slot.

        Args:
            in_front: Wait at the front of the queue, so that started work is finished first.
        """
        if self.try_acquire(in_front=in_front):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if in_front:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self.remove_waiter(waiter)
            else:
                self.release(is_unused=True)
            raise

    def _on_rate_timer(self) -> None:
        self._rate_timer = None
        self._wake()

    def add_waiter(self, waiter: SlotWaiter) -> None:
        """Add a waiter with callbacks; its `set_result` is called when it has a slot."""
        self._waiters.append(waiter)

    def remove_waiter(self, waiter: SlotWaiter) -> None:
        """Remove a waiter that no longer needs a slot."""
        self._waiters.remove(waiter)
        self._wake()

    def release(self, *, is_unused: bool = False) -> None:
        """Release a slot; `is_unused` is whether no request was sent."""
        if is_unused and self.rate is not None:
            self.rate.restore()
        self._held -= 1
        if self._waiters:
            self._wake()

    def start_slowly(self, limit: int, delay_seconds: float) -> None:
        """Let all requests wait for a time, and then start with a lower limit."""
        self._limit = 0.0

        def open_slots() -> None:
            self._limit = float(limit)
            self._wake()

        asyncio.get_running_loop().call_later(delay_seconds, open_slots)

    def release_after_success(self) -> None:
        """Release a slot, and grow the limit, up to `max_in_flight`."""
        self._held -= 1
        if self._limit < self._max:
            self._limit = min(self._max, self._limit + max(_GROWTH, 1 / self._limit))
        if self._waiters:
            self._wake()

    def on_throttled(self, num_cuts: int) -> None:
        """Halve the limit, unless it was halved after the throttled request was sent.

        Args:
            num_cuts: The value of `AdaptiveLimit.num_cuts` when the request was sent.
        """
        if num_cuts == self.num_cuts:
            self.num_cuts += 1
            self._limit = max(1.0, self._limit / 2)

    def _wake(self) -> None:
        if self._is_waking:  # a waiter has released its slot within `set_result`
            return
        self._is_waking = True
        try:
            # A cancelled waiter calls `remove_waiter`, which wakes the next waiter.
            while self._waiters and not self._waiters[0].cancelled():
                if not self.try_acquire(in_front=True):
                    break
                self._waiters.popleft().set_result(None)
        finally:
            self._is_waking = False


_MIN_SECONDS: Final = 0.001
"""Resolution of the event loops' timers."""


class RequestSequence(Protocol):
    """Requests sent one after another without a task.

    Attributes:
        started_at: Start of the current request, on the monotonic clock.
    """

    started_at: float

    def expire(self) -> None:
        """Fail the current request, because its deadline has passed."""


class Deadlines:
    """A replacement for `asyncio.timeout` for all requests of a store, which have the same timeout.

    A task is added at the start of a call, and is cancelled at its deadline; `pop_expired` then
    returns whether the deadline was the reason. Only the outermost call of a task has a deadline,
    because the deadline of an inner call would be later. A sequence is added once, and sets its
    `started_at` for each of its requests.

    Args:
        seconds: Timeout of each request.
        clock: Returns the monotonic time in seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        # Start of each task's call and `Task.cancelling()` at that time; the oldest call is first.
        self._tasks: dict[asyncio.Task[Any], tuple[float, int]] = {}
        # `Task.cancelling()` at the start of the call, for each task cancelled by its deadline.
        self._expired: dict[asyncio.Task[Any], int] = {}
        self._sequences: set[RequestSequence] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no task and no sequence has a deadline."""
        return not (self._tasks or self._expired or self._sequences)

    def add(self, task: asyncio.Task[Any], now: float) -> bool:
        """Add the running task; return False if an outer call has already added it."""
        if task in self._tasks or task in self._expired:
            return False
        self._tasks[task] = now, task.cancelling()
        if self._timer is None:
            self._set_timer(self._seconds, asyncio.get_running_loop())
        return True

    def remove(self, task: asyncio.Task[Any]) -> None:
        """Remove a task, whose call has returned."""
        self._tasks.pop(task, None)
        if self._expired:
            self.pop_expired(task)

    def pop_expired(self, task: asyncio.Task[Any]) -> bool:
        """Return True, once, for a task that was cancelled by its deadline and by nothing else."""
        num_before = self._expired.pop(task, None)
        return num_before is not None and task.uncancel() <= num_before

    def add_sequence(self, sequence: RequestSequence) -> None:
        """Add a sequence, whose first request has started."""
        self._sequences.add(sequence)
        if self._timer is None:
            self._set_timer(self._seconds, asyncio.get_running_loop())

    def remove_sequence(self, sequence: RequestSequence) -> None:
        """Remove a sequence, which sends no more requests."""
        self._sequences.discard(sequence)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(max(seconds, _MIN_SECONDS), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expire the late requests, and set the timer for the next deadline."""
        self._timer = None
        latest_start = self._clock() - self._seconds
        for sequence in tuple(self._sequences):
            if sequence.started_at <= latest_start:
                sequence.expire()
        while self._tasks:
            task, (started_at, num_before) = next(iter(self._tasks.items()))
            if started_at > latest_start:
                break
            del self._tasks[task]
            self._expired[task] = num_before
            task.cancel()
        starts = [sequence.started_at for sequence in self._sequences]
        starts += (started_at for started_at, _ in itertools.islice(self._tasks.values(), 1))
        if starts:
            self._set_timer(min(starts) - latest_start, loop)


_NUM_BINS = len(LATENCY_BOUNDS_SECONDS) + 1


@dataclass(slots=True)
class Counters:
    """Counters of `StoreStats` for one event loop. Only this loop writes; any thread may read."""

    num_requests: int = 0
    num_retries: int = 0
    num_failures: int = 0
    num_throttled: int = 0
    num_checksum_mismatches: int = 0
    bytes_received: int = 0
    bytes_unverified: int = 0
    bytes_sent: int = 0
    num_in_flight: int = 0
    total_seconds: float = 0.0
    """Sum of the durations of successful attempts."""
    call_seconds: float = 0.0
    """Sum of the durations of successful calls."""
    slowest: tuple[float, str] = (0.0, "")
    """Duration and key of the slowest successful call."""
    failures: dict[str, int] = field(default_factory=dict)
    """Numbers of transient failures by cause; see `StoreStats.failures`."""
    latency: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    """Numbers of successful attempts by duration; see `LatencyHistogram.counts`."""
    call_latency: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    """Numbers of successful calls by duration."""

    @property
    def num_ended(self) -> int:
        """Number of attempts that have ended."""
        return self.num_requests - self.num_in_flight

    def add_call(self, key: str, seconds: float) -> None:
        """Add the duration of a successful call."""
        self.call_latency[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.call_seconds += seconds
        if seconds > self.slowest[0]:
            self.slowest = seconds, key

    def add(self, other: Counters) -> None:
        """Add the sums of another loop."""
        for name in (*_SUMS, "total_seconds", "call_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("latency", "call_latency"):
            bins = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, list(map(sum, bins)))
        self.slowest = max(self.slowest, other.slowest)
        for cause, count in dict(other.failures).items():
            self.failures[cause] = self.failures.get(cause, 0) + count

    def stats(self, *, uri: str, max_in_flight: int, seconds: float) -> StoreStats:
        """Return the sums; `max_in_flight` is the current limit of requests in flight."""
        slowest_seconds, slowest_key = self.slowest
        return StoreStats(
            **{name: getattr(self, name) for name in _SUMS},
            max_in_flight=max_in_flight,
            seconds=seconds,
            failures=self.failures,
            latency=LatencyHistogram(tuple(self.latency), self.total_seconds),
            call_latency=LatencyHistogram(tuple(self.call_latency), self.call_seconds),
            slowest_call_seconds=slowest_seconds,
            slowest_call_uri=join_uri(uri, slowest_key) if slowest_seconds else "",
        )


_SUMS = tuple(counter.name for counter in fields(Counters))[:-6]
"""Fields that `StoreStats` has under the same names."""


class StoreCounters:
    """Counters of one store. Each event loop writes to a set of its own, without a lock."""

    def __init__(self) -> None:
        self._opened_at = time.monotonic()
        self._closed_loops = Counters()
        self._lock = ForkSafeLock()
        self._loops: list[tuple[weakref.ref[AbstractEventLoop], Counters, AdaptiveLimit]] = []

    def add_loop(self, loop: AbstractEventLoop, counters: Counters, limit: AdaptiveLimit) -> None:
        """Add the counters of `loop`, and sum up the counters of closed loops."""
        live = []
        with self._lock.current:
            for entry in self._loops:
                if not _is_open(entry[0]):
                    self._closed_loops.add(entry[1])
                    self._closed_loops.num_in_flight = 0  # requests in flight ended with their loop
                else:
                    live.append(entry)
            self._loops = [*live, (weakref.ref(loop), counters, limit)]

    @property
    def num_repeated(self) -> int:
        """Number of requests that were repeated, after a failure or because of wrong bytes."""
        all_counters = [self._closed_loops, *(counters for _, counters, _ in self._loops)]
        return sum([each.num_retries + each.num_checksum_mismatches for each in all_counters])

    def stats(self, uri: str, max_in_flight: int) -> StoreStats:
        """Return the sums over all loops.

        Args:
            uri: Uri of the store.
            max_in_flight: The limit that is reported while no loop is open.
        """
        total = Counters()
        total.add(self._closed_loops)
        entries = self._loops
        for _, counters, _ in entries:
            total.add(counters)
        limits = [limit.limit for loop, _, limit in entries if _is_open(loop)]
        return total.stats(
            uri=uri,
            max_in_flight=sum(limits) if limits else max_in_flight,
            seconds=time.monotonic() - self._opened_at,
        )


def cause_of(error: TransientError) -> str:
    """Return the cause of a failure, as `StoreStats.failures` names it."""
    if error.status is not None:
        return f"HTTP {error.status}"
    if error.unconnected:
        return error.unconnected
    if error.is_damaged or error.is_malformed:
        return "wrong bytes" if error.is_damaged else "malformed"
    transport = error.__cause__
    if isinstance(transport, StalledError):
        return "stalled"
    return "lost connection" if isinstance(transport, ConnectionLostError) else "other"


def _is_open(reference: weakref.ref[AbstractEventLoop]) -> bool:
    loop = reference()
    return loop is not None and not loop.is_closed()


class Admission:
    """Decides whether a request of a store may start on one event loop, and learns from its end.

        bytes in flight -> slot, token of the rate -> `start` -> request -> `succeed` or `fail`

    Bytes come before the slot: a request that waits for bytes must not block a slot.

    Args:
        max_in_flight: Largest number of requests in flight.
        max_in_flight_bytes: Largest number of bytes of their bodies.
        retry: Deadline of a request, and the retry budget.
        counters: What `Store.stats` reports.
        clock: Returns the monotonic time in seconds.

    Attributes:
        slots: Requests in flight.
        bytes: Bytes in flight.
        budget: Retries that may be sent.
        deadlines: Deadlines of the requests in flight.
        counters: As given.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        max_in_flight_bytes: int,
        retry: RetryPolicy,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = AdaptiveLimit(max_in_flight)
        self.bytes = ByteBudget(max_in_flight_bytes)
        self.budget = RetryBudget(burst=retry.budget_retries, per_second=retry.budget_per_second)
        self.deadlines = Deadlines(retry.deadline_seconds, clock=clock)
        self.counters = counters
        self._clock = clock

    def try_enter(self, num_bytes: int) -> bool:
        """Acquire a slot and bytes; return False if one of them is not free or has waiters."""
        if not self.bytes.try_acquire(num_bytes):
            return False
        if not self.slots.try_acquire():
            self.bytes.release(num_bytes)
            return False
        return True

    def add_waiter(self, waiter: SlotWaiter, num_bytes: int) -> bool:
        """Acquire bytes and add a waiter for a slot; return False if the bytes are not free."""
        if not self.bytes.try_acquire(num_bytes):
            return False
        self.slots.add_waiter(waiter)
        return True

    def remove_waiter(self, waiter: SlotWaiter, num_bytes: int) -> None:
        """Remove a waiter for a slot, and release the bytes that were acquired for it."""
        self.slots.remove_waiter(waiter)
        self.bytes.release(num_bytes)

    def cancel(self, num_bytes: int, *, was_started: bool = False) -> None:
        """Release a slot and bytes with which no request was sent, and do not count the request."""
        if was_started:
            self.counters.num_requests -= 1
            self.counters.num_in_flight -= 1
        self.bytes.release(num_bytes)
        self.slots.release(is_unused=True)

    def start(self) -> float:
        """Count a request that is sent, and return its start on the clock."""
        self.counters.num_requests += 1
        self.counters.num_in_flight += 1
        return self._clock()

    async def start_another(self, num_bytes: int) -> None:
        """Wait for the rate, and count one more request within a slot, which receives bytes."""
        rate, clock = self.slots.rate, asyncio.get_running_loop().time
        while rate is not None and (wait := rate.try_acquire(clock())):  # noqa: ASYNC110
            await asyncio.sleep(wait)
        self.counters.num_requests += 1
        self.counters.bytes_received += num_bytes

    def succeed(
        self,
        started_at: float,
        *,
        was_retry: bool = False,
        call_key: str | None = None,
    ) -> float:
        """Learn from a request that succeeded, and release its slot; return the time on the clock.

        Args:
            started_at: The result of `start`.
            was_retry: Whether the request was a retry.
            call_key: Key of the object, if the request was a whole call of the store.
        """
        now = self._clock()
        counters, seconds = self.counters, now - started_at
        number = bisect_left(LATENCY_BOUNDS_SECONDS, seconds)
        counters.num_in_flight -= 1
        counters.latency[number] += 1
        counters.total_seconds += seconds
        if call_key is not None:
            counters.call_latency[number] += 1
            counters.call_seconds += seconds
            if seconds > counters.slowest[0]:
                counters.slowest = seconds, call_key
        self.slots.release_after_success()
        budget = self.budget
        if was_retry or budget.tokens < budget.most:
            budget.on_success(was_retry=was_retry)
        return now

    def fail(self, error: BaseException, num_cuts: int) -> None:
        """Learn from a request that failed, and release its slot.

        Args:
            error: The failure.
            num_cuts: Value of `AdaptiveLimit.num_cuts` when the request was sent.
        """
        counters = self.counters
        counters.num_in_flight -= 1
        counters.num_failures += 1
        if isinstance(error, TransientError):
            cause = cause_of(error)
            counters.failures[cause] = counters.failures.get(cause, 0) + 1
            if error.status in THROTTLED:
                counters.num_throttled += 1
                self.slots.on_throttled(num_cuts)
        self.slots.release()
