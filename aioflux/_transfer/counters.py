"""Counters of the requests of one store."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from aioflux._concurrency.fork_safe_lock import ForkSafeLock
from aioflux._values.stats import LATENCY_BOUNDS_SECONDS, LatencyHistogram, StoreStats

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aioflux._transfer.limits import AdaptiveLimit

_NUM_BINS = len(LATENCY_BOUNDS_SECONDS) + 1


@dataclass(slots=True)
class Counters:
    """Counters of `StoreStats` for one event loop. Only this loop writes; any thread may read."""

    num_requests: int = 0
    num_retries: int = 0
    num_failures: int = 0
    num_throttled: int = 0
    num_checksum_mismatches: int = 0
    bytes_received: int = 0
    bytes_unverified: int = 0
    bytes_sent: int = 0
    num_in_flight: int = 0
    total_seconds: float = 0.0
    """Sum of the durations of successful attempts."""
    call_seconds: float = 0.0
    """Sum of the durations of successful calls."""
    latency: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    """Numbers of successful attempts by duration; see `LatencyHistogram.counts`."""
    call_latency: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    """Numbers of successful calls by duration."""

    def add_latency(self, seconds: float, *, is_call: bool = False) -> None:
        """Add the duration of a successful attempt, which is also that of a call if `is_call`."""
        number = bisect_left(LATENCY_BOUNDS_SECONDS, seconds)
        self.latency[number] += 1
        self.total_seconds += seconds
        if is_call:
            self.call_latency[number] += 1
            self.call_seconds += seconds

    def add_call(self, seconds: float) -> None:
        """Add the duration of a successful call."""
        self.call_latency[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.call_seconds += seconds

    def add(self, other: Counters) -> None:
        """Add the sums of another loop."""
        for name in (*_SUMS, "total_seconds", "call_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("latency", "call_latency"):
            bins = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, list(map(sum, bins)))

    def stats(self, *, max_in_flight: int) -> StoreStats:
        """Return the sums; `max_in_flight` is the current limit of requests in flight."""
        return StoreStats(
            **{name: getattr(self, name) for name in _SUMS},
            max_in_flight=max_in_flight,
            latency=LatencyHistogram(tuple(self.latency), self.total_seconds),
            call_latency=LatencyHistogram(tuple(self.call_latency), self.call_seconds),
        )


_SUMS = tuple(counter.name for counter in fields(Counters))[:-4]
"""Fields that `StoreStats` has under the same names."""


class StoreCounters:
    """Counters of one store. Each event loop writes to a set of its own, without a lock."""

    def __init__(self) -> None:
        self._closed_loops = Counters()
        self._lock = ForkSafeLock()
        self._loops: list[tuple[weakref.ref[AbstractEventLoop], Counters, AdaptiveLimit]] = []

    def add_loop(self, loop: AbstractEventLoop, limit: AdaptiveLimit) -> Counters:
        """Return new counters for `loop`, and sum up the counters of closed loops."""
        live = []
        counters = Counters()
        with self._lock.current:
            for entry in self._loops:
                if not _is_open(entry[0]):
                    self._closed_loops.add(entry[1])
                    self._closed_loops.num_in_flight = 0  # requests in flight ended with their loop
                else:
                    live.append(entry)
            self._loops = [*live, (weakref.ref(loop), counters, limit)]
        return counters

    @property
    def num_repeated(self) -> int:
        """Number of requests that were repeated, after a failure or because of wrong bytes."""
        all_counters = [self._closed_loops, *(counters for _, counters, _ in self._loops)]
        return sum([each.num_retries + each.num_checksum_mismatches for each in all_counters])

    def stats(self, max_in_flight: int) -> StoreStats:
        """Return the sums over all loops.

        Args:
            max_in_flight: The limit that is reported while no loop is open.
        """
        total = Counters()
        total.add(self._closed_loops)
        entries = self._loops
        for _, counters, _ in entries:
            total.add(counters)
        limits = [limit.limit for loop, _, limit in entries if _is_open(loop)]
        return total.stats(max_in_flight=sum(limits) if limits else max_in_flight)


def _is_open(reference: weakref.ref[AbstractEventLoop]) -> bool:
    loop = reference()
    return loop is not None and not loop.is_closed()
