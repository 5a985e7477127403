"""When to save: every so many steps or seconds, and when the process is told to end.

A signal only sets a flag: a handler that saved would find the state half changed, and other ranks
somewhere else. What is to be done is asked at the border of a step, where all ranks are.
"""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

__all__ = ["Schedule", "Signals"]

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"


class Schedule:
    """Saves every so many steps, or after so much time."""

    def __init__(self, every: int | timedelta | None) -> None:
        if isinstance(every, bool) or not isinstance(every, int | timedelta | None):
            raise TypeError(f"every must be a number of steps or a timedelta, not {every!r}")
        length = every.total_seconds() if isinstance(every, timedelta) else every
        if length is not None and not length > 0:
            raise ValueError(f"every must be above 0, not {every!r}")
        self._every = every
        self._last = time.monotonic()

    @property
    def is_timed(self) -> bool:
        """Whether the time decides, which is not the same on all ranks."""
        return isinstance(self._every, timedelta)

    def is_due(self, step: int) -> bool:
        """Tell whether to save after a step."""
        if isinstance(self._every, timedelta):
            return time.monotonic() - self._last >= self._every.total_seconds()
        return self._every is not None and step > 0 and step % self._every == 0

    def begin(self) -> None:
        """Know that a save begins now."""
        self._last = time.monotonic()


class Signals:
    """Signals that ask for a last save."""

    def __init__(self) -> None:
        self._before: dict[int, _Handler] = {}
        self._asked: float | None = None
        self._deadline_seconds = 0.0
        self.is_agreed = False
        """Whether all ranks know of it."""

    @property
    def is_installed(self) -> bool:
        """Whether signals are watched for."""
        return bool(self._before)

    @property
    def is_asked(self) -> bool:
        """Whether a signal came to this rank."""
        return self._asked is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        if self._asked is None:
            return self._deadline_seconds
        return max(0.0, self._asked + self._deadline_seconds - time.monotonic())

    def install(self, signals: Sequence[int], deadline_seconds: float) -> None:
        """Watch for signals, from the main thread.

        Args:
            signals: Their numbers.
            deadline_seconds: Time from the signal to the end of the last save, in seconds.
        """
        self._deadline_seconds = deadline_seconds
        for number in signals:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)

    def agree(self) -> None:
        """Know that some rank was asked, and with it all are."""
        self.is_agreed = True
        if self._asked is None:
            self._asked = time.monotonic()

    def restore(self) -> None:
        """Leave signals to whom they were left before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = time.monotonic()
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
