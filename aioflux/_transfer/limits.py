"""Limits of the requests that one store has in flight, and of the bytes of their bodies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from aioflux._concurrency.byte_budget import ByteBudget

__all__ = ["AdaptiveLimit", "Limits", "SizeEstimate", "SlotWaiter"]

_GROWTH = 1 / 8
"""Growth of a limit of 8 or more after each success: a limit that was halved from 64 to 32 is 64
again after 256 successes."""


class SlotWaiter(Protocol):
    """A waiter for a request slot: the future of a task, or an object with callbacks."""

    def cancelled(self) -> bool:
        """Return whether the waiter was cancelled. A cancelled waiter calls `remove_waiter`."""

    def set_result(self, result: None, /) -> None:
        """Continue with a slot, which was acquired for this waiter."""


class AdaptiveLimit:
    """A semaphore of request slots, with fewer slots while the service throttles.

    The limit is halved when the service throttles a request that was sent after the limit was last
    halved, and grows again with every success: additive increase, multiplicative decrease (Chiu and
    Jain, "Analysis of the Increase and Decrease Algorithms", 1989).

    Attributes:
        num_cuts: Number of times that the limit was halved.
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
        """Number of slots in use."""
        return self._held

    def try_acquire(self) -> bool:
        """Acquire a slot; return False if no slot is free or there are waiters."""
        if self._waiters or self._held >= int(self._limit):
            return False
        self._held += 1
        return True

    async def acquire(self, *, in_front: bool = False) -> None:
        """Wait for a slot.

        Args:
            in_front: Wait at the front of the queue, so that started work is finished first.
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
        """Add a waiter with callbacks; its `set_result` is called when it has a slot."""
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
            while self._waiters and self._held < int(self._limit):
                waiter = self._waiters[0]
                if waiter.cancelled():  # it calls `remove_waiter`, which wakes the next waiter
                    return
                self._waiters.popleft()
                self._held += 1
                waiter.set_result(None)
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
        """Release a slot and bytes."""
        self.bytes.release(num_bytes)
        self.requests.release()
