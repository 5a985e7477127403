"""How much may be under way at once in one store: requests and bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ByteBudget", "Limits", "SizeEstimate"]


class ByteBudget:
    """A first-come-first-served budget of bytes.

    A request for more than the whole budget waits until nothing else is under way, and then passes
    alone: one range or part is always let through.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        return self._held

    def _fits(self, size: int) -> bool:
        return self._held <= 0 or self._held + size <= self._max

    async def acquire(self, size: int) -> None:
        """Wait for `size` bytes. Cancellation gives back what was granted."""
        if not self._waiting and self._fits(size):
            self._held += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(entry)
                self._wake()
            else:
                self.release(size)
            raise

    def charge(self, size: int) -> None:
        """Take bytes without waiting: they are in memory already; who comes later waits."""
        self._held += size

    def release(self, size: int) -> None:
        """Give bytes back."""
        self._held -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting[0]
            if turn.cancelled():  # its own handler removes it, and wakes the next
                return
            self._waiting.popleft()
            self._held += size
            turn.set_result(None)


class SizeEstimate:
    """A moving mean of object sizes: what a read of unknown size is charged for.

    Args:
        first_bytes: What is taken before any size is known.
    """

    def __init__(self, first_bytes: int) -> None:
        self._mean = float(first_bytes)

    @property
    def num_bytes(self) -> int:
        """The estimate, in bytes."""
        return int(self._mean)

    def add(self, num_bytes: int) -> None:
        """Take one more size into account; an eighth of the weight goes to the newest."""
        self._mean += (num_bytes - self._mean) / 8


class _Slot:
    """One place of `Limits.slot`; a generator-based context manager costs 3 microseconds more."""

    __slots__ = ("_limits", "_num_bytes")

    def __init__(self, limits: Limits, num_bytes: int) -> None:
        self._limits = limits
        self._num_bytes = num_bytes

    async def __aenter__(self) -> None:
        # Bytes first: who waits for memory must not keep a place from a request that needs none.
        await self._limits.bytes.acquire(self._num_bytes)
        try:
            await self._limits.requests.acquire()
        except BaseException:
            self._limits.bytes.release(self._num_bytes)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._limits.requests.release()
        self._limits.bytes.release(self._num_bytes)


class Limits:
    """The bounded semaphore and the byte budget of one store on one loop."""

    def __init__(self, *, max_in_flight: int, max_in_flight_bytes: int) -> None:
        self.requests = asyncio.BoundedSemaphore(max_in_flight)
        self.bytes = ByteBudget(max_in_flight_bytes)
        # Sixteen reads at first, more or fewer as soon as the first sizes are known.
        self.unknown_size = SizeEstimate(max(1, max_in_flight_bytes // 16))

    def slot(self, num_bytes: int = 0) -> _Slot:
        """Hold a place for one request whose bodies have `num_bytes`."""
        return _Slot(self, num_bytes)
