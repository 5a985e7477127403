"""A clock of event loops that advances without waiting, for exact and fast tests of timings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["Clock", "clock_of_this_loop", "loop_time"]


class Clock:
    """The clock of the running loop, which advances only when the loop waits.

    When nothing is left to do but to wait for a timer, its time has come. Threads have no part in
    it: a test that waits for one has no use for this clock.

    Attributes:
        now: Seconds since an arbitrary start.
        num_waits: Number of timers that the loop has waited for.
    """

    def __init__(self, loop: Any, patch: pytest.MonkeyPatch) -> None:
        self.now = 1024.0  # a power of two, so that sums are not rounded
        self.num_waits = 0
        self._select_events = loop._selector.select
        patch.setattr(loop._selector, "select", self._select)
        patch.setattr(loop, "time", lambda: self.now)

    def _select(self, timeout: float | None = None) -> list[Any]:
        events: list[Any] = self._select_events(None if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
            self.num_waits += 1
        return events


def clock_of_this_loop(patch: pytest.MonkeyPatch) -> Clock:
    return Clock(asyncio.get_running_loop(), patch)


def loop_time() -> float:
    """Return the time of the running loop: the `clock` of sessions and deadlines in tests."""
    return asyncio.get_running_loop().time()
