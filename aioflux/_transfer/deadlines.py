"""Deadlines of many calls with one timer: a timer for each would cost as much as its request."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadlines"]

_MIN_SECONDS: Final = 0.001
"""Resolution of the event loops' timers."""


class RequestSequence(Protocol):
    """Requests without a task, one after another.

    Attributes:
        started_at: Start of the request under way, on the monotonic clock.
    """

    started_at: float

    def expire(self) -> None:
        """End the request under way: its time is over."""


class Deadlines:
    """`asyncio.timeout` for all requests of a store, which have equal times.

    A task that is added is cancelled when its time is over; `pop_expired` then returns whether that
    was the reason. Calls within a call have no time of their own: the outer one ends first. A
    sequence is added once for many requests: each of them costs nothing here.

    Args:
        seconds: Time that each request has.
        clock: The monotonic clock, in seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        # Start of each task's call, and its cancellation requests by then: the oldest is first.
        self._tasks: dict[asyncio.Task[Any], tuple[float, int]] = {}
        # Those requests, of each task that was cancelled here.
        self._expired: dict[asyncio.Task[Any], int] = {}
        self._sequences: set[RequestSequence] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether nothing has a deadline."""
        return not (self._tasks or self._expired or self._sequences)

    def add(self, task: asyncio.Task[Any], now: float) -> bool:
        """Add the running task; return False if an outer call has added it."""
        if task in self._tasks or task in self._expired:
            return False
        self._tasks[task] = now, task.cancelling()
        if self._timer is None:
            self._set_timer(self._seconds, asyncio.get_running_loop())
        return True

    def remove(self, task: asyncio.Task[Any]) -> None:
        """Remove a task."""
        self._tasks.pop(task, None)
        if self._expired:
            self.pop_expired(task)

    def pop_expired(self, task: asyncio.Task[Any]) -> bool:
        """Return, once, whether a task is being cancelled for its deadline alone."""
        before = self._expired.pop(task, None)
        return before is not None and task.uncancel() <= before

    def add_sequence(self, sequence: RequestSequence) -> None:
        """Add a sequence, whose first request has started."""
        self._sequences.add(sequence)
        if self._timer is None:
            self._set_timer(self._seconds, asyncio.get_running_loop())

    def remove_sequence(self, sequence: RequestSequence) -> None:
        """Remove a sequence."""
        self._sequences.discard(sequence)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(max(seconds, _MIN_SECONDS), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what is late, and set the timer for what is late next."""
        self._timer = None
        last = self._clock() - self._seconds
        for sequence in tuple(self._sequences):
            if sequence.started_at <= last:
                sequence.expire()
        while self._tasks:
            task, (started_at, num_before) = next(iter(self._tasks.items()))
            if started_at > last:
                break
            del self._tasks[task]
            self._expired[task] = num_before
            task.cancel()
        starts = [sequence.started_at for sequence in self._sequences]
        starts += (started_at for started_at, _ in itertools.islice(self._tasks.values(), 1))
        if starts:
            self._set_timer(min(starts) - last, loop)
