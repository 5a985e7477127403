"""Bytes that one iteration holds before its consumer needs them, granted in order of the items."""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import dataclass, field

__all__ = ["PrefetchBudget", "Reservation"]


@dataclass(order=True, slots=True)
class _Waiter:
    index: int
    size: int = field(compare=False)
    future: asyncio.Future[None] = field(compare=False)


class PrefetchBudget:
    """A budget of bytes for items whose size may be known late.

    An item that needs more than it holds acquires the rest if it is free; otherwise it releases
    what it holds, and waits for all of it: two that wait for more while they hold a part would
    wait for each other without end.

    The budget is exceeded in two cases, by one item at a time: an item is larger by itself, or all
    items before it were yielded in order. Those behind it, which may hold everything, cannot be
    yielded before it is.

    Args:
        max_bytes: The budget.
        ordered: Items are yielded in the order of their indexes.
    """

    def __init__(self, max_bytes: int, *, ordered: bool) -> None:
        self._max = max_bytes
        self._ordered = ordered
        self._held = 0
        self._num_yielded = 0
        self._waiters: list[_Waiter] = []

    def reserve(self, index: int, num_bytes: int = 0) -> Reservation:
        """Return the reservation of an item for which `num_bytes` are held already."""
        return Reservation(self, index, num_bytes)

    def try_acquire(self, index: int, size: int) -> bool:
        """Acquire `size` bytes for an item that holds none; return whether they were free."""
        if not self.may_grow(index, 0, size):
            return False
        self._held += size
        return True

    def release_yielded(self, count: int, num_bytes: int) -> None:
        """Release the bytes of `count` items that the consumer no longer needs."""
        self._num_yielded += count
        self.change(-num_bytes)

    def may_grow(self, index: int, old: int, new: int) -> bool:
        """Return whether an item that holds `old` bytes may hold `new` now."""
        if new <= old or (self._ordered and index == self._num_yielded):
            return True
        if self._waiters and self._waiters[0].index < index:
            return False
        return self._held <= old or self._held - old + new <= self._max

    def change(self, num_bytes: int) -> None:
        """Add `num_bytes` to what is held, and wake the waiters that now fit."""
        self._held += num_bytes
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters:
            first = self._waiters[0]
            # The handler of one that is cancelled removes it, and wakes the next.
            if first.future.cancelled() or not self.may_grow(first.index, 0, first.size):
                return
            del self._waiters[0]
            self._held += first.size
            first.future.set_result(None)

    async def acquire(self, index: int, size: int) -> None:
        """Wait for `size` bytes, before all items of a higher index."""
        waiter = _Waiter(index, size, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.cancelled():
                self._waiters.remove(waiter)
                self.change(0)
            else:
                self.change(-size)
            raise


class Reservation:
    """Bytes that one item holds.

    Attributes:
        num_bytes: Bytes that it holds.
    """

    __slots__ = ("_budget", "_index", "num_bytes")

    def __init__(self, budget: PrefetchBudget, index: int, num_bytes: int) -> None:
        self._budget = budget
        self._index = index
        self.num_bytes = num_bytes

    def try_acquire(self, size: int) -> bool:
        """Release what it holds, and hold `size` bytes if they are free; return whether."""
        if self.num_bytes:
            self.set(0)
        if not self._budget.may_grow(self._index, 0, size):
            return False
        self.set(size)
        return True

    async def acquire(self, size: int) -> None:
        """Release what it holds, and wait for `size` bytes."""
        if not self.try_acquire(size):
            await self._budget.acquire(self._index, size)
            self.num_bytes = size

    def grow(self, size: int) -> bool:
        """Hold at least `size` bytes if they are free; return whether."""
        if not self._budget.may_grow(self._index, self.num_bytes, size):
            return False
        self.set(max(size, self.num_bytes))
        return True

    def set(self, size: int) -> None:
        """Hold `size` bytes, which are in memory already."""
        self._budget.change(size - self.num_bytes)
        self.num_bytes = size
