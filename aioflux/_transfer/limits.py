"""Limits of the requests that one store has in flight, and of the bytes of their bodies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from aioflux._concurrency.byte_budget import ByteBudget

_GROWTH = 1 / 8
"""Growth of a limit of 8 or more after each success: a limit that was halved from 64 to 32 is 64
again after 256 successes."""
_REQUESTS_PER_SECOND: Final = 5000
"""Reads per second that a bucket serves at first: 5,000 objects (Cloud Storage, "Request rate and
access distribution guidelines"), 5,500 for each prefix (S3, "Optimizing performance")."""
_FEW_RANKS: Final = 64


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


class RequestRate:
    """A token bucket of the attempts that a store may send, of the tokens of 0.1 s or of one token.

    It starts with a share `fraction` of them, a random number in `[0, 1)`, so that the first
    requests of many processes are spread over time.
    """

    def __init__(self, per_second: float, *, fraction: float) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second / 10)
        self._tokens = self._most * fraction
        self._filled_at: float | None = None

    def try_acquire(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        added = (now - self._filled_at) * self._per_second if self._filled_at is not None else 0.0
        self._tokens, self._filled_at = min(self._most, self._tokens + added), now
        if self._tokens < 1 - 1e-9:  # a timer may fire that much early
            return (1 - self._tokens) / self._per_second
        self._tokens -= 1
        return 0.0

    def restore(self) -> None:
        """Return the token of a request that was not sent."""
        self._tokens += 1


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


class SizeEstimate:
    """A moving mean of object sizes, for the first ranges of objects of unknown size.

    Args:
        first_bytes: The estimate before any size is known.

    Attributes:
        is_known: Whether at least one size was added.
        num_bytes: The estimate, in bytes.
    """

    def __init__(self, first_bytes: int) -> None:
        self.is_known = False
        self.num_bytes = first_bytes
        self._mean = float(first_bytes)

    def add(self, num_bytes: int) -> None:
        """Add the size of an object.

        The first size replaces the estimate; each later size has an eighth of the weight.
        """
        if num_bytes != self._mean:
            self._mean += (num_bytes - self._mean) / (8 if self.is_known else 1)
            self.num_bytes = int(self._mean)
        self.is_known = True


class Limits:
    """The adaptive limit of requests and the byte budget of one store on one loop."""

    def __init__(self, *, max_in_flight: int, max_in_flight_bytes: int) -> None:
        self.requests = AdaptiveLimit(max_in_flight)
        self.bytes = ByteBudget(max_in_flight_bytes)
        # 0 until a size is known: `first_range_bytes` then returns a share of the byte budget.
        self.unknown_size = SizeEstimate(0)

    def try_acquire(self, num_bytes: int) -> bool:
        """Acquire a slot and bytes; return False if one of them is not free or has waiters."""
        if not self.bytes.try_acquire(num_bytes):
            return False
        if not self.requests.try_acquire():
            self.bytes.release(num_bytes)
            return False
        return True

    def add_waiter(self, waiter: SlotWaiter, num_bytes: int) -> bool:
        """Acquire bytes and add a waiter for a slot; return False if the bytes are not free."""
        if not self.bytes.try_acquire(num_bytes):
            return False
        self.requests.add_waiter(waiter)
        return True

    def remove_waiter(self, waiter: SlotWaiter, num_bytes: int) -> None:
        """Remove a waiter for a slot, and release the bytes that were acquired for it."""
        self.requests.remove_waiter(waiter)
        self.bytes.release(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Release a slot and bytes with which no request was sent."""
        self.bytes.release(num_bytes)
        self.requests.release(is_unused=True)
