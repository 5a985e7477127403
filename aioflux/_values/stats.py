"""Counters of a store, and the hook that is called as bytes move."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf, ldexp
from typing import Literal, Protocol

__all__ = ["LATENCY_BOUNDS_SECONDS", "LatencyHistogram", "Progress", "ProgressHook", "StoreStats"]

LATENCY_BOUNDS_SECONDS = tuple(
    ldexp(1 + quarter / 4, octave) for octave in range(-14, 10) for quarter in range(4)
)
"""Upper bounds of the histogram's bins but the last, in seconds: 61 us to 896 s, four to an octave,
so that a quantile is at most a quarter too high."""


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Durations of attempts, from the request to the end of its response."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_SECONDS) + 1)
    """Attempts in each bin; bin i ends at `LATENCY_BOUNDS_SECONDS[i]`, and the last has no end."""
    total_seconds: float = 0.0
    """Sum of all times, in seconds."""

    @property
    def count(self) -> int:
        """Attempts in all bins."""
        return sum(self.counts)

    @property
    def mean_seconds(self) -> float:
        """Mean time of an attempt, in seconds; 0 if there was none."""
        return self.total_seconds / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return a time that `share` of the attempts did not exceed, in seconds.

        Args:
            share: From 0 to 1; 0.5 is the median.

        Returns:
            The upper bound of the bin that holds the quantile: at most a quarter too high. 0 if
            there was no attempt, infinity beyond the last bound.

        Raises:
            ValueError: `share` is outside of [0, 1].
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {share!r}")
        if not self.count:
            return 0.0
        sums = list(accumulate(self.counts))
        at = bisect_left(sums, max(1, ceil(share * sums[-1])))
        return (*LATENCY_BOUNDS_SECONDS, inf)[at]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Counters of a store in this process, summed over all event loops at one moment."""

    num_requests: int = 0
    """Attempts sent, repeated ones included. One attempt is one request, but for a copy that the
    service does in several calls."""
    num_retries: int = 0
    """Attempts that repeated an earlier one."""
    num_failures: int = 0
    """Attempts that ended with an error or were cancelled."""
    num_throttled: int = 0
    """Attempts that the service throttled (429 or 503)."""
    bytes_received: int = 0
    """Bytes of object bodies received, those of bodies that broke off included."""
    bytes_sent: int = 0
    """Bytes of object bodies sent and acknowledged."""
    num_in_flight: int = 0
    """Requests under way now."""
    max_in_flight: int = 0
    """Requests that may be under way now; below `TransferOptions.max_in_flight` while the service
    is throttling."""
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Durations of attempts that succeeded."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of one object that have just moved."""

    uri: str
    """Whole uri of the object."""
    direction: Literal["received", "sent"]
    """Direction of the bytes."""
    num_bytes: int
    """Bytes since the last call for this object and direction: those of one range, part or whole
    small object. Bytes that are read again, because they broke off or did not verify, count
    again."""


class ProgressHook(Protocol):
    """Called on the event loop as bytes move; must be quick and must not block.

    An exception that it raises fails the request of these bytes.
    """

    def __call__(self, progress: Progress, /) -> None:
        """Take note of `progress`."""
        ...
