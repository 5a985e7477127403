"""Budgets of bytes: one that many tasks share, and one of the items of an iteration."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from dataclasses import dataclass, field


class ByteBudget:
    """A first-come-first-served budget of bytes.

    A caller that needs more bytes than the whole budget acquires them when no other bytes are held,
    so that a range or part of any size can be transferred.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._held = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Number of bytes that are acquired and not yet released."""
        return self._held

    @property
    def free_bytes(self) -> int:
        """Number of bytes that can be acquired now; negative after `hold` exceeded the budget."""
        return self._max - self._held

    def hold(self, size: int) -> None:
        """Acquire `size` bytes that are in memory already, even if that exceeds the budget."""
        self._held += size

    def try_acquire(self, size: int) -> bool:
        """Acquire `size` bytes and return True; False if they are not free, or other calls wait.

        No bytes are always free, also while one call holds more than the whole budget.
        """
        held = self._held
        if not size:
            return True
        if self._waiters or (held > 0 and held + size > self._max):
            return False
        self._held = held + size
        return True

    async def acquire(self, size: int) -> None:
        """Wait for `size` bytes, and acquire them. A cancelled call holds no bytes."""
        if self.try_acquire(size):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, waiter)
        self._waiters.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiters.remove(entry)
                self._wake()
            else:
                self.release(size)
            raise

    def release(self, size: int) -> None:
        """Release `size` bytes."""
        self._held -= size
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters:
            size, waiter = self._waiters[0]
            is_too_much = self._held > 0 and self._held + size > self._max
            if is_too_much or waiter.cancelled():  # a cancelled waiter removes itself in `acquire`
                return
            self._waiters.popleft()
            self._held += size
            waiter.set_result(None)


@dataclass(order=True, slots=True)
class _Waiter:
    index: int
    size: int = field(compare=False)
    future: asyncio.Future[None] = field(compare=False)


class PrefetchBudget:
    """A budget of bytes for items whose size may be unknown at first.

    Waiting items acquire bytes in the order of their indexes.

    An item that needs more bytes than it holds acquires the rest if the rest is free. Otherwise it
    releases all its bytes, and waits for the whole size: two items that kept their bytes and waited
    for more could wait for each other for ever.

    One item at a time may exceed the budget, in two cases. The item is larger than the budget. Or
    the items are yielded in order and the item is the next one: the items after it may hold the
    whole budget, and release nothing before the item is yielded.

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
        """Return the reservation of an item, which already holds `num_bytes`."""
        return Reservation(self, index, num_bytes)

    def try_acquire(self, index: int, size: int) -> bool:
        """Acquire `size` bytes for an item that holds none; return False if they are not free."""
        if not self.may_grow(index, 0, size):
            return False
        self._held += size
        return True

    def release_yielded(self, count: int, num_bytes: int) -> None:
        """Release the bytes of `count` yielded items, which the consumer no longer needs."""
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
        """Add `num_bytes` to the held bytes, and wake the waiters whose bytes are free now."""
        self._held += num_bytes
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters:
            first = self._waiters[0]
            # A cancelled waiter removes itself in `acquire`, and wakes the next waiter.
            if first.future.cancelled() or not self.may_grow(first.index, 0, first.size):
                return
            del self._waiters[0]
            self._held += first.size
            first.future.set_result(None)

    async def acquire(self, index: int, size: int) -> None:
        """Wait until `size` bytes are free, and acquire them before items of a higher index."""
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
    """The share of a prefetch budget that one item holds.

    Attributes:
        num_bytes: Size of the share in bytes.
    """

    __slots__ = ("_budget", "_index", "num_bytes")

    def __init__(self, budget: PrefetchBudget, index: int, num_bytes: int) -> None:
        self._budget = budget
        self._index = index
        self.num_bytes = num_bytes

    def try_acquire(self, size: int) -> bool:
        """Release all bytes and acquire `size` bytes; return False if they are not free."""
        if self.num_bytes:
            self.set(0)
        if not self._budget.may_grow(self._index, 0, size):
            return False
        self.set(size)
        return True

    async def acquire(self, size: int) -> None:
        """Release all bytes, and wait for `size` bytes."""
        if not self.try_acquire(size):
            await self._budget.acquire(self._index, size)
            self.num_bytes = size

    def grow(self, size: int) -> bool:
        """Acquire the missing bytes up to `size`; return False if they are not free."""
        if not self._budget.may_grow(self._index, self.num_bytes, size):
            return False
        self.set(max(size, self.num_bytes))
        return True

    def set(self, size: int) -> None:
        """Change the reservation to `size` bytes in memory, even if that exceeds the budget."""
        self._budget.change(size - self.num_bytes)
        self.num_bytes = size
