"""Deadlines of many requests with one timer: a timer for each would double a request's cost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

_MIN_SECONDS: Final = 0.001
"""Resolution of the event loops' timers."""


class RequestSequence(Protocol):
    """Requests sent one after another without a task.

    Attributes:
        started_at: Start of the current request, on the monotonic clock.
    """

    started_at: float

    def expire(self) -> None:
        """Fail the current request, because its deadline has passed."""


class Deadlines:
    """A replacement for `asyncio.timeout` for all requests of a store, which have the same timeout.

    A task is added at the start of a call, and is cancelled at its deadline; `pop_expired` then
    returns whether the deadline was the reason. Only the outermost call of a task has a deadline,
    because the deadline of an inner call would be later. A sequence is added once, and sets its
    `started_at` for each of its requests.

    Args:
        seconds: Timeout of each request.
        clock: Returns the monotonic time in seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        # Start of each task's call and `Task.cancelling()` at that time; the oldest call is first.
        self._tasks: dict[asyncio.Task[Any], tuple[float, int]] = {}
        # `Task.cancelling()` at the start of the call, for each task cancelled by its deadline.
        self._expired: dict[asyncio.Task[Any], int] = {}
        self._sequences: set[RequestSequence] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no task and no sequence has a deadline."""
        return not (self._tasks or self._expired or self._sequences)

    def add(self, task: asyncio.Task[Any], now: float) -> bool:
        """Add the running task; return False if an outer call has already added it."""
        if task in self._tasks or task in self._expired:
            return False
        self._tasks[task] = now, task.cancelling()
        if self._timer is None:
            self._set_timer(self._seconds, asyncio.get_running_loop())
        return True

    def remove(self, task: asyncio.Task[Any]) -> None:
        """Remove a task, whose call has returned."""
        self._tasks.pop(task, None)
        if self._expired:
            self.pop_expired(task)

    def pop_expired(self, task: asyncio.Task[Any]) -> bool:
        """Return True, once, for a task that was cancelled by its deadline and by nothing else."""
        num_before = self._expired.pop(task, None)
        return num_before is not None and task.uncancel() <= num_before

    def add_sequence(self, sequence: RequestSequence) -> None:
        """Add a sequence, whose first request has started."""
        self._sequences.add(sequence)
        if self._timer is None:
            self._set_timer(self._seconds, asyncio.get_running_loop())

    def remove_sequence(self, sequence: RequestSequence) -> None:
        """Remove a sequence, which sends no more requests."""
        self._sequences.discard(sequence)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(max(seconds, _MIN_SECONDS), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expire the late requests, and set the timer for the next deadline."""
        self._timer = None
        latest_start = self._clock() - self._seconds
        for sequence in tuple(self._sequences):
            if sequence.started_at <= latest_start:
                sequence.expire()
        while self._tasks:
            task, (started_at, num_before) = next(iter(self._tasks.items()))
            if started_at > latest_start:
                break
            del self._tasks[task]
            self._expired[task] = num_before
            task.cancel()
        starts = [sequence.started_at for sequence in self._sequences]
        starts += (started_at for started_at, _ in itertools.islice(self._tasks.values(), 1))
        if starts:
            self._set_timer(min(starts) - latest_start, loop)
