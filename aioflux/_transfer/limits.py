"""Limits of what one store has in flight: requests, and bytes of bodies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from aioflux._concurrency.byte_budget import ByteBudget

__all__ = ["AdaptiveLimit", "Limits", "SizeEstimate", "SlotWaiter"]

_GROWTH = 1 / 8
"""Growth of a limit of 8 or more after each success: a limit that was halved from 64 to 32 is back
at 64 after 256 successes."""


class SlotWaiter(Protocol):
    """A waiter for a request slot: a task's future, or an object without a task."""

    def cancelled(self) -> bool:
        """Return whether it no longer waits; then it removes itself."""

    def set_result(self, result: None, /) -> None:
        """Receive a slot that was acquired for the waiter."""


class AdaptiveLimit:
    """A semaphore of request slots whose number falls while the service throttles.

    The limit halves when the service throttles a request that was sent after the last cut, and
    grows back with every success: additive increase, multiplicative decrease (Chiu and Jain,
    "Analysis of the Increase and Decrease Algorithms", 1989).

    Attributes:
        num_cuts: Times that the limit was halved.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.num_cuts = 0
        self._max = max_in_flight
        self._limit = float(max_in_flight)
        self._held = 0
        self._waiters: deque[SlotWaiter] = deque()
        self._is_waking = False

    @property
    def limit(self) -> int:
        """Current number of slots."""
        return int(self._limit)

    @property
    def num_held(self) -> int:
        """Slots in use."""
        return self._held

    def try_acquire(self) -> bool:
        """Acquire a slot if one is free and nothing waits; return whether one was acquired."""
        if self._waiters or self._held >= int(self._limit):
            return False
        self._held += 1
        return True

    async def acquire(self, *, in_front: bool = False) -> None:
        """Wait for a slot.

        Args:
            in_front: Wait before all others, so that started work is finished first.
        """
        if self._held < int(self._limit) and (in_front or not self._waiters):
            self._held += 1
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
                self.release()
            raise

    def add_waiter(self, waiter: SlotWaiter) -> None:
        """Add a waiter without a task; `set_result` is called when it has a slot."""
        self._waiters.append(waiter)

    def remove_waiter(self, waiter: SlotWaiter) -> None:
        """Remove a waiter that no longer needs a slot."""
        self._waiters.remove(waiter)
        self._wake()

    def release(self) -> None:
        """Release a slot."""
        self._held -= 1
        if self._waiters:
            self._wake()

    def on_success(self) -> None:
        """Grow the limit, up to `max_in_flight`."""
        if self._limit < self._max:
            self._limit = min(self._max, self._limit + max(_GROWTH, 1 / self._limit))
            self._wake()

    def on_throttled(self, num_cuts: int) -> None:
        """Halve the limit, unless it was halved since the throttled request was sent.

        Args:
            num_cuts: The value of `num_cuts` when it was sent.
        """
        if num_cuts == self.num_cuts:
            self.num_cuts += 1
            self._limit = max(1.0, self._limit / 2)

    def _wake(self) -> None:
        if self._is_waking:  # a waiter has released its slot at once
            return
        self._is_waking = True
        try:
            while self._waiters and self._held < int(self._limit):
                waiter = self._waiters[0]
                if waiter.cancelled():  # its own handler removes it, and wakes the next
                    return
                self._waiters.popleft()
                self._held += 1
                waiter.set_result(None)
        finally:
            self._is_waking = False


class SizeEstimate:
    """A moving mean of object sizes, for the byte budget of reads of unknown size.

    Args:
        first_bytes: The estimate before any size is known.

    Attributes:
        is_known: At least one size was added.
        num_bytes: The estimate, in bytes.
    """

    def __init__(self, first_bytes: int) -> None:
        self.is_known = False
        self.num_bytes = first_bytes
        self._mean = float(first_bytes)

    def add(self, num_bytes: int) -> None:
        """Add one size; the newest has an eighth of the weight."""
        if num_bytes != self._mean:
            self._mean += (num_bytes - self._mean) / (8 if self.is_known else 1)
            self.num_bytes = int(self._mean)
        self.is_known = True


class Limits:
    """The adaptive limit of requests and the byte budget of one store on one loop."""

    def __init__(self, *, max_in_flight: int, max_in_flight_bytes: int) -> None:
        self.requests = AdaptiveLimit(max_in_flight)
        self.bytes = ByteBudget(max_in_flight_bytes)
        # With 0, `first_range_bytes` starts from the share of one request in the byte budget.
        self.unknown_size = SizeEstimate(0)

    def try_acquire(self, num_bytes: int) -> bool:
        """Acquire a slot and bytes if both are free and nothing waits; return whether it did."""
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
        """Remove a waiter, and release its bytes."""
        self.requests.remove_waiter(waiter)
        self.bytes.release(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Release a slot and bytes."""
        self.bytes.release(num_bytes)
        self.requests.release()
