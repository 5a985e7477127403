"""Counters of the requests of one store."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from aioflux._values.stats import LATENCY_BOUNDS_SECONDS, LatencyHistogram, StoreStats

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aioflux._transfer.limits import AdaptiveLimit

__all__ = ["Counters", "StoreCounters"]


@dataclass(slots=True)
class Counters:
    """Sums that one event loop writes and any thread reads; those of `StoreStats`."""

    num_requests: int = 0
    num_retries: int = 0
    num_failures: int = 0
    num_throttled: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    num_in_flight: int = 0
    total_seconds: float = 0.0
    """Sum of the durations of attempts that succeeded."""
    latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_SECONDS) + 1))
    """Those attempts by duration; see `LatencyHistogram.counts`."""

    def add_latency(self, seconds: float) -> None:
        """Add the duration of an attempt."""
        self.latency[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds

    def add(self, other: Counters) -> None:
        """Add the sums of another loop."""
        for name in (*_SUMS, "total_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latency = [a + b for a, b in zip(self.latency, other.latency, strict=True)]

    def stats(self, *, max_in_flight: int) -> StoreStats:
        """Return a copy; `max_in_flight` requests may be under way now."""
        return StoreStats(
            **{name: getattr(self, name) for name in _SUMS},
            max_in_flight=max_in_flight,
            latency=LatencyHistogram(tuple(self.latency), self.total_seconds),
        )


_SUMS = tuple(each.name for each in fields(Counters))[:-2]
"""Fields that `StoreStats` has, too."""


class StoreCounters:
    """Counters of one store: one set for each event loop, so that no two threads write to one."""

    def __init__(self) -> None:
        self._ended = Counters()
        self._loops: list[tuple[weakref.ref[AbstractEventLoop], Counters, AdaptiveLimit]] = []

    def add_loop(self, loop: AbstractEventLoop, limit: AdaptiveLimit) -> Counters:
        """Return new counters for `loop`, and sum up those of loops that ended."""
        live = []
        for entry in self._loops:
            if not _is_open(entry[0]):
                self._ended.add(entry[1])
                self._ended.num_in_flight = 0  # requests under way ended with their loop
            else:
                live.append(entry)
        counters = Counters()
        self._loops = [*live, (weakref.ref(loop), counters, limit)]
        return counters

    def stats(self, max_in_flight: int) -> StoreStats:
        """Return the sums over all loops; a new loop begins with `max_in_flight`."""
        total = Counters()
        total.add(self._ended)
        entries = self._loops
        for _, counters, _ in entries:
            total.add(counters)
        limits = [limit.limit for loop, _, limit in entries if _is_open(loop)]
        return total.stats(max_in_flight=sum(limits) if limits else max_in_flight)


def _is_open(reference: weakref.ref[AbstractEventLoop]) -> bool:
    loop = reference()
    return loop is not None and not loop.is_closed()
