"""Bytes that one iteration holds ahead of its consumer, granted in the order of its items."""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import dataclass, field

__all__ = ["Ahead", "Share"]


@dataclass(order=True, slots=True)
class _Waiting:
    index: int
    size: int = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Ahead:
    """A budget of bytes whose holders may find out late how many they need.

    Who needs more than it has takes that at once where there is room; otherwise it gives back what
    it has, and waits for all of it: two that wait for more while they hold a part would wait for
    each other without end.

    More than the budget is held in two cases, by one item at a time: where an item by itself is
    larger, and where all items before it have been given out in order. Those behind it, which may
    hold everything, cannot go before it does.

    Args:
        max_bytes: The budget.
        ordered: Items are given out in the order of their indexes.
    """

    def __init__(self, max_bytes: int, *, ordered: bool) -> None:
        self._max = max_bytes
        self._ordered = ordered
        self._held = 0
        self._num_given = 0
        self._waiting: list[_Waiting] = []

    def share(self, index: int, num_bytes: int = 0) -> Share:
        """Return the share of one item, which holds so many bytes already."""
        return Share(self, index, num_bytes)

    def take(self, index: int, size: int) -> bool:
        """Hold `size` bytes for an item that holds none, if they are there at once."""
        if not self.may_grow(index, 0, size):
            return False
        self._held += size
        return True

    def given(self, count: int, num_bytes: int) -> None:
        """Let go of `count` items with `num_bytes` together, which the consumer has done with."""
        self._num_given += count
        self.change(-num_bytes)

    def may_grow(self, index: int, old: int, new: int) -> bool:
        """Tell whether an item that holds `old` bytes may hold `new` now."""
        if new <= old or (self._ordered and index == self._num_given):
            return True
        if self._waiting and self._waiting[0].index < index:
            return False
        return self._held <= old or self._held - old + new <= self._max

    def change(self, num_bytes: int) -> None:
        """Count bytes that are taken or, below 0, given back; and let those pass that now fit."""
        self._held += num_bytes
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            # The handler of one that is cancelled removes it, and lets the next pass.
            if first.turn.cancelled() or not self.may_grow(first.index, 0, first.size):
                return
            del self._waiting[0]
            self._held += first.size
            first.turn.set_result(None)

    async def acquire(self, index: int, size: int) -> None:
        """Wait for `size` bytes, before all items of a higher index."""
        entry = _Waiting(index, size, asyncio.get_running_loop().create_future())
        insort(self._waiting, entry)
        try:
            await entry.turn
        except asyncio.CancelledError:
            if entry.turn.cancelled():
                self._waiting.remove(entry)
                self.change(0)
            else:
                self.change(-size)
            raise


class Share:
    """What one item holds.

    Attributes:
        num_bytes: Bytes that it holds.
    """

    __slots__ = ("_ahead", "_index", "num_bytes")

    def __init__(self, ahead: Ahead, index: int, num_bytes: int) -> None:
        self._ahead = ahead
        self._index = index
        self.num_bytes = num_bytes

    def take(self, size: int) -> bool:
        """Hold `size` bytes instead of what it holds, if they are there at once; tell whether."""
        if self.num_bytes:
            self.set(0)
        if not self._ahead.may_grow(self._index, 0, size):
            return False
        self.set(size)
        return True

    async def acquire(self, size: int) -> None:
        """Hold `size` bytes instead of what it holds; that is given back before it waits."""
        if not self.take(size):
            await self._ahead.acquire(self._index, size)
            self.num_bytes = size

    def grow(self, size: int) -> bool:
        """Hold at least `size` bytes where that is possible at once."""
        if not self._ahead.may_grow(self._index, self.num_bytes, size):
            return False
        self.set(max(size, self.num_bytes))
        return True

    def set(self, size: int) -> None:
        """Hold `size` bytes, which are in memory already."""
        self._ahead.change(size - self.num_bytes)
        self.num_bytes = size
