"""Deadlines of many calls with one timer: a timer for each would cost as much as its request."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Final, Protocol

__all__ = ["Deadlines"]

_MIN_SECONDS: Final = 0.001
"""What loops can tell apart."""


class Runner(Protocol):
    """What does one request after another without a task.

    Attributes:
        began: When the request under way began, on the monotonic clock.
    """

    began: float

    def expire(self) -> None:
        """Take note that the time of the request under way is over."""


class Deadlines:
    """Ends what takes too long; as `asyncio.timeout`, for all of a store.

    A task that enters leaves again, and is cancelled where its time is over; `expired` then tells
    whether that is why it was. What it does within that has no time of its own: the outer one ends
    first. A runner enters once for many requests: a request of it costs nothing here.

    Args:
        seconds: Time that each request has.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # When each task entered, and requests for its cancellation by then: the first entry is the
        # oldest.
        self._entered: dict[asyncio.Task[Any], tuple[float, int]] = {}
        # Those requests, of each task that was cancelled here.
        self._cancelled: dict[asyncio.Task[Any], int] = {}
        self._runners: set[Runner] = set()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, task: asyncio.Task[Any], now: float) -> bool:
        """Begin to watch a task.

        Args:
            task: The running task.
            now: The monotonic clock's time, in seconds.

        Returns:
            Whether it was not watched before: who entered it first lets it leave.
        """
        if task in self._entered or task in self._cancelled:
            return False
        self._entered[task] = now, task.cancelling()
        if self._timer is None:
            self._come_in(self._seconds, asyncio.get_running_loop())
        return True

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Watch a task no more."""
        self._entered.pop(task, None)
        if self._cancelled:
            self.expired(task)

    def expired(self, task: asyncio.Task[Any]) -> bool:
        """Tell whether a task that is being cancelled is so for its time alone; tells it once."""
        before = self._cancelled.pop(task, None)
        return before is not None and task.uncancel() <= before

    def enter_runner(self, runner: Runner) -> None:
        """Begin to watch a runner, whose first request has begun."""
        self._runners.add(runner)
        if self._timer is None:
            self._come_in(self._seconds, asyncio.get_running_loop())

    def leave_runner(self, runner: Runner) -> None:
        """Watch a runner no more."""
        self._runners.discard(runner)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _come_in(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(max(seconds, _MIN_SECONDS), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End those whose time is over; come again when that of the next one is."""
        self._timer = None
        last = time.monotonic() - self._seconds
        for runner in tuple(self._runners):
            if runner.began <= last:
                runner.expire()
        while self._entered:
            task, (began, num_before) = next(iter(self._entered.items()))
            if began > last:
                break
            del self._entered[task]
            self._cancelled[task] = num_before
            task.cancel()
        watched = [runner.began for runner in self._runners]
        watched += (began for began, _ in itertools.islice(self._entered.values(), 1))
        if watched:
            self._come_in(min(watched) - last, loop)
