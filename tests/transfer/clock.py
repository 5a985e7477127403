"""Time that a test moves: what it says of seconds holds on any machine, and at once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from aioflux._transfer import deadlines as _deadlines
from aioflux._transfer import session as _session
from aioflux._transfer import small_read_loop as _small_read_loop
from aioflux._transfer.retry import with_retry

if TYPE_CHECKING:
    import pytest

__all__ = ["Clock", "ShiftedClock", "clock_of_this_loop"]


class Clock:
    """The clock of the running loop and of what measures requests on it.

    Where nothing is left to do but to wait for a timer, its time has come. Threads have no part in
    it: a test that waits for one has no use for this clock.
    """

    def __init__(self, loop: Any, patch: pytest.MonkeyPatch) -> None:
        self.now = 1024.0  # powers of two: sums of such seconds are not rounded
        self._look = loop._selector.select
        patch.setattr(loop._selector, "select", self._select)
        _measure_by(self, loop, patch)

    def monotonic(self) -> float:
        return self.now

    def _select(self, timeout: float | None = None) -> list[Any]:
        events: list[Any] = self._look(None if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
        return events


class ShiftedClock:
    """The clock of the running loop and of what measures requests on it, which a test sets forward.

    Attributes:
        ahead: Seconds that it is ahead of the machine's.
    """

    def __init__(self, loop: Any, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        _measure_by(self, loop, patch)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def _measure_by(clock: Clock | ShiftedClock, loop: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "time", clock.monotonic)
    for module in (_deadlines, _small_read_loop, _session):
        patch.setattr(module, "time", clock)
    assert with_retry.__kwdefaults__ is not None
    patch.setitem(with_retry.__kwdefaults__, "clock", clock.monotonic)


def clock_of_this_loop(patch: pytest.MonkeyPatch) -> Clock:
    return Clock(asyncio.get_running_loop(), patch)
