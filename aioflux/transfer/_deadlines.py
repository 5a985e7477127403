"""Deadlines of many calls with one timer: a timer for each would cost as much as its request."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

__all__ = ["Deadlines"]

_MIN_SECONDS: Final = 0.001
"""What loops can tell apart."""


class Deadlines:
    """Cancels tasks that take too long for what they do; as `asyncio.timeout`, for all of a store.

    A task that enters leaves again, before it enters once more:

        task = deadlines.enter(time.monotonic())
        try:
            ...
        except asyncio.CancelledError:
            if deadlines.expired(task): ...
        finally:
            deadlines.leave(task)

    Args:
        seconds: Time that each task has.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # When each task entered: the first entry is the oldest.
        self._entered: dict[asyncio.Task[Any], float] = {}
        # Requests for cancellation, other than ours, that each cancelled task had had by then.
        self._cancelled: dict[asyncio.Task[Any], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, now: float) -> asyncio.Task[Any]:
        """Begin to watch the running task.

        Args:
            now: The monotonic clock's time, in seconds.
        """
        task = asyncio.current_task()
        assert task is not None
        self._entered[task] = now
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._look, loop)
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Watch a task no more."""
        self._entered.pop(task, None)
        if self._cancelled:
            self.expired(task)

    def expired(self, task: asyncio.Task[Any]) -> bool:
        """Tell whether a task that is being cancelled is so for its time alone; tells it once."""
        before = self._cancelled.pop(task, None)
        return before is not None and task.uncancel() <= before

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel those whose time is over; come again when that of the next one is."""
        self._timer = None
        now = time.monotonic()
        while self._entered:
            task, entered = next(iter(self._entered.items()))
            left = entered + self._seconds - now
            if left > 0:
                self._timer = loop.call_later(max(left, _MIN_SECONDS), self._look, loop)
                return
            del self._entered[task]
            self._cancelled[task] = task.cancelling()
            task.cancel()
