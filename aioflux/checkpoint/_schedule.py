"""Schedule and StopSignals: when to save, after steps or seconds and before the process ends.

A signal only sets a flag: a handler that saved would find the state half changed, and the other
ranks at other points. The flag is read between two steps, when all ranks are at the same point.
"""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

__all__ = ["Schedule", "StopSignals"]

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"


class Schedule:
    """Decides after which steps to save: every N steps, or once an interval has passed."""

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
        """Return whether saves are due by time, which differs between ranks."""
        return isinstance(self._every, timedelta)

    def is_due(self, step: int) -> bool:
        """Return whether to save after a step."""
        if isinstance(self._every, timedelta):
            return time.monotonic() - self._last >= self._every.total_seconds()
        return self._every is not None and step > 0 and step % self._every == 0

    def restart(self) -> None:
        """Start the interval anew: a save starts now."""
        self._last = time.monotonic()


class StopSignals:
    """Handlers of signals that request a last save before the process ends."""

    def __init__(self) -> None:
        self._before: dict[int, _Handler] = {}
        self._asked: float | None = None
        self._deadline_seconds = 0.0
        self.is_agreed = False
        """Whether all ranks know that one received a signal."""

    @property
    def is_installed(self) -> bool:
        """Return whether handlers are installed."""
        return bool(self._before)

    @property
    def is_asked(self) -> bool:
        """Return whether this rank received a signal, or knows that another one did."""
        return self._asked is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        if self._asked is None:
            return self._deadline_seconds
        return max(0.0, self._asked + self._deadline_seconds - time.monotonic())

    def install(self, signals: Sequence[int], deadline_seconds: float) -> None:
        """Install handlers, from the main thread."""
        self._deadline_seconds = deadline_seconds
        for number in signals:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)

    def agree(self) -> None:
        """Note that some rank received a signal, which counts for all."""
        self.is_agreed = True
        if self._asked is None:
            self._asked = time.monotonic()

    def restore(self) -> None:
        """Restore the earlier handlers."""
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
