"""How much may be under way at once in one store: requests and bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

__all__ = ["AdaptiveLimit", "ByteBudget", "Limits", "SizeEstimate", "Turn"]

_GROWTH = 1 / 8
"""What one success adds to a limit of 8 or more: where every thousandth request is throttled, the
half that was taken from 64 is back after 256 of them."""


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

    def take(self, size: int) -> bool:
        """Take `size` bytes if they are there at once and nobody waits; tell whether they were."""
        if self._waiting or not self._fits(size):
            return False
        self._held += size
        return True

    async def acquire(self, size: int) -> None:
        """Wait for `size` bytes. Cancellation gives back what was granted."""
        if self.take(size):
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
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting[0]
            if turn.cancelled():  # its own handler removes it, and wakes the next
                return
            self._waiting.popleft()
            self._held += size
            turn.set_result(None)


class Turn(Protocol):
    """Whoever waits in a line: a task's future, or what goes on without a task."""

    def cancelled(self) -> bool:
        """Whether it waits no more; then it takes itself out of the line."""

    def set_result(self, result: None, /) -> None:
        """Take the place that it has been given."""


class AdaptiveLimit:
    """A bounded semaphore that gives way to a service under pressure.

    The limit halves when the service throttles a request that was sent after the last cut, and
    grows back with every success: additive increase, multiplicative decrease (Chiu and Jain,
    "Analysis of the Increase and Decrease Algorithms", 1989).
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max = max_in_flight
        self._limit = float(max_in_flight)
        self._held = 0
        self._num_cuts = 0
        self._waiting: deque[Turn] = deque()
        self._is_waking = False

    @property
    def limit(self) -> int:
        """Places there are now."""
        return int(self._limit)

    @property
    def num_held(self) -> int:
        """Places that are taken now."""
        return self._held

    @property
    def mark(self) -> int:
        """A mark of this moment, for `throttled`."""
        return self._num_cuts

    def take(self) -> int | None:
        """Take a place if there is one at once and nobody waits.

        Returns:
            A mark of this moment, for `throttled`; None where no place was taken.
        """
        if self._waiting or self._held >= int(self._limit):
            return None
        self._held += 1
        return self._num_cuts

    async def acquire(self, *, in_front: bool = False) -> int:
        """Wait for a place.

        Args:
            in_front: Wait before all others: what was begun is finished first.

        Returns:
            A mark of this moment, for `throttled`.
        """
        if self._held >= int(self._limit) or (self._waiting and not in_front):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if in_front:
                self._waiting.appendleft(turn)
            else:
                self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._waiting.remove(turn)
                    self._wake()
                else:
                    self.release()
                raise
        else:
            self._held += 1
        return self._num_cuts

    def stand_in_line(self, turn: Turn) -> None:
        """Wait without a task where `take` gave no place; the place comes with `set_result`."""
        self._waiting.append(turn)

    def leave_line(self, turn: Turn) -> None:
        """Wait no more."""
        self._waiting.remove(turn)
        self._wake()

    def release(self) -> None:
        """Give a place back."""
        self._held -= 1
        if self._waiting:
            self._wake()

    def succeeded(self) -> None:
        """Grow a little, up to the limit that the user set."""
        if self._limit < self._max:
            self._limit = min(self._max, self._limit + max(_GROWTH, 1 / self._limit))
            self._wake()

    def throttled(self, mark: int) -> None:
        """Halve, unless the limit was cut since the request was sent.

        Args:
            mark: What `acquire` returned to the request that was throttled.
        """
        if mark == self._num_cuts:
            self._num_cuts += 1
            self._limit = max(1.0, self._limit / 2)

    def _wake(self) -> None:
        if self._is_waking:  # one that was given a place gives it back at once
            return
        self._is_waking = True
        try:
            while self._waiting and self._held < int(self._limit):
                turn = self._waiting[0]
                if turn.cancelled():  # its own handler removes it, and wakes the next
                    return
                self._waiting.popleft()
                self._held += 1
                turn.set_result(None)
        finally:
            self._is_waking = False


class SizeEstimate:
    """A moving mean of object sizes: what a read of unknown size is charged for.

    Args:
        first_bytes: What is taken before any size is known.

    Attributes:
        is_known: It rests on the size of an object.
        num_bytes: The estimate, in bytes.
    """

    def __init__(self, first_bytes: int) -> None:
        self.is_known = False
        self.num_bytes = first_bytes
        self._mean = float(first_bytes)

    def add(self, num_bytes: int) -> None:
        """Take one more size into account; an eighth of the weight goes to the newest."""
        if num_bytes != self._mean:
            self._mean += (num_bytes - self._mean) / (8 if self.is_known else 1)
            self.num_bytes = int(self._mean)
        self.is_known = True


class Limits:
    """The adaptive limit of requests and the byte budget of one store on one loop."""

    def __init__(self, *, max_in_flight: int, max_in_flight_bytes: int) -> None:
        self.requests = AdaptiveLimit(max_in_flight)
        self.bytes = ByteBudget(max_in_flight_bytes)
        # Nothing at first: each read by name begins with a range of its even share of the budget.
        self.unknown_size = SizeEstimate(0)

    def take(self, num_bytes: int) -> int | None:
        """Take a place and bytes if both are there at once and nobody waits.

        Returns:
            A mark of this moment, for `AdaptiveLimit.throttled`; None where nothing was taken.
        """
        if not self.bytes.take(num_bytes):
            return None
        mark = self.requests.take()
        if mark is None:
            self.bytes.release(num_bytes)
        return mark

    def stand_in_line(self, turn: Turn, num_bytes: int) -> bool:
        """Take bytes if they are there at once, and wait for a place, which `take` did not give.

        Returns:
            Whether it has the bytes and waits.
        """
        if not self.bytes.take(num_bytes):
            return False
        self.requests.stand_in_line(turn)
        return True

    def leave_line(self, turn: Turn, num_bytes: int) -> None:
        """Wait no more, and give the bytes back."""
        self.requests.leave_line(turn)
        self.bytes.release(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Give back what `take` took."""
        self.bytes.release(num_bytes)
        self.requests.release()
