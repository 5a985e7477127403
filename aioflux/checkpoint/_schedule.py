"""Schedule and StopSignals: when to save, by steps, by time, and before the process exits.

A signal handler only sets a flag. It cannot save: the training step may have changed only half of
the state, and the other ranks are at other points of the step. The training loop reads the flag
between two steps, when all ranks are at the same point.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from types import FrameType

    from aioflux.checkpoint._save.handle import SaveHandle

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"


class Schedule:
    """The rule of `Checkpointer(every=)`: save every N steps, or after each interval of time."""

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
        """Return whether `every` is a time, which each rank measures by its own clock."""
        return isinstance(self._every, timedelta)

    def should_save(self, step: int) -> bool:
        """Return whether to save after a step."""
        if isinstance(self._every, timedelta):
            return time.monotonic() - self._last >= self._every.total_seconds()
        return self._every is not None and step > 0 and step % self._every == 0

    def restart(self) -> None:
        """Start a new interval, at the start of a save."""
        self._last = time.monotonic()


class StopSignals:
    """Handlers of signals that request a save before the process exits."""

    def __init__(self) -> None:
        self._earlier_handlers: dict[int, _Handler] = {}
        self._received_at = 0.0
        self._deadline_seconds = 0.0
        self.num_received = 0
        """Signals that this rank received, or knows that another rank did."""
        self._num_saved = 0
        """Of these signals, those that arrived before a committed save began."""
        self.is_agreed = False
        """Whether all ranks know that a rank received a signal."""
        self.has_warned = False
        """Whether the caller was warned that training goes on after the save."""

    @property
    def is_installed(self) -> bool:
        """Return whether handlers are installed."""
        return bool(self._earlier_handlers)

    @property
    def is_pending(self) -> bool:
        """Return whether no save that began after the last signal is committed."""
        return self.num_received > self._num_saved

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline of the pending signal, at least 0."""
        return max(0.0, self._received_at + self._deadline_seconds - time.monotonic())

    def install(self, signals: Sequence[int], deadline_seconds: float) -> None:
        """Install handlers; call this from the main thread."""
        self._deadline_seconds = deadline_seconds
        for number in signals:
            if number not in self._earlier_handlers:
                self._earlier_handlers[number] = signal.signal(number, self._handle)

    def agree(self) -> None:
        """Record that all ranks know of a signal, which this rank may not have received."""
        self.is_agreed = True
        if not self.is_pending:
            self._receive()

    def finish(self, num_received: int, handle: SaveHandle) -> None:
        """Record the end of a save that began after `num_received` signals."""
        if handle.is_committed:
            self._num_saved = max(self._num_saved, num_received)

    def restore(self) -> None:
        """Restore the handlers that were installed before."""
        earlier, self._earlier_handlers = self._earlier_handlers, {}
        for number, handler in earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._receive()
        earlier = self._earlier_handlers.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _receive(self) -> None:
        if not self.is_pending:
            self._received_at = time.monotonic()
        self.num_received += 1
