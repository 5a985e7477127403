"""Counters of the requests of one store."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from typing import TYPE_CHECKING

from aioflux._values.stats import LATENCY_BOUNDS_SECONDS, LatencyHistogram, StoreStats

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aioflux._transfer.limits import AdaptiveLimit

__all__ = ["Counters", "StoreCounters"]


class Counters:
    """Sums that one event loop writes and any thread reads.

    Attributes:
        num_requests: Attempts sent.
        num_retries: Attempts that repeated an earlier one.
        num_failures: Attempts that ended with an error or were cancelled.
        num_throttled: Attempts that the service throttled (429 or 503).
        bytes_received: Bytes of object bodies received.
        bytes_sent: Bytes of object bodies sent.
        num_in_flight: Requests under way.
    """

    __slots__ = (
        "_latency",
        "_total_seconds",
        "bytes_received",
        "bytes_sent",
        "num_failures",
        "num_in_flight",
        "num_requests",
        "num_retries",
        "num_throttled",
    )

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_retries = 0
        self.num_failures = 0
        self.num_throttled = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.num_in_flight = 0
        self._total_seconds = 0.0
        self._latency = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)

    def add_latency(self, seconds: float) -> None:
        """Add the duration of an attempt."""
        self._latency[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self._total_seconds += seconds

    def add(self, other: Counters) -> None:
        """Add the sums of another loop."""
        for name in Counters.__slots__[2:]:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._total_seconds += other._total_seconds
        self._latency = [a + b for a, b in zip(self._latency, other._latency, strict=True)]

    def stats(self, *, max_in_flight: int) -> StoreStats:
        """Return a copy; `max_in_flight` requests may be under way now."""
        return StoreStats(
            num_requests=self.num_requests,
            num_retries=self.num_retries,
            num_failures=self.num_failures,
            num_throttled=self.num_throttled,
            bytes_received=self.bytes_received,
            bytes_sent=self.bytes_sent,
            num_in_flight=self.num_in_flight,
            max_in_flight=max_in_flight,
            latency=LatencyHistogram(tuple(self._latency), self._total_seconds),
        )


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
