"""A budget of bytes that many tasks share."""

from __future__ import annotations

import asyncio
from collections import deque


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
