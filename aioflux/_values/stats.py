"""Counters of a store, and the protocol of progress hooks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf, ldexp
from typing import Literal, Protocol

LATENCY_BOUNDS_SECONDS = tuple(
    ldexp(1 + quarter / 4, octave) for octave in range(-14, 10) for quarter in range(4)
)
"""Upper bounds of the bins of the histogram, except the last bin, in seconds: 61 us to 896 s. Each
octave (factor 2) has four bounds, so that a quantile is at most a quarter too high."""


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Histogram of durations, of attempts or of calls; see `StoreStats`."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_SECONDS) + 1)
    """Number of durations in each bin. Bin i ends at `LATENCY_BOUNDS_SECONDS[i]`, the last bin at
    infinity."""
    total_seconds: float = 0.0
    """Sum of all durations, in seconds."""

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean_seconds(self) -> float:
        """Mean duration, in seconds; 0 without durations."""
        return self.total_seconds / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return a quantile of the durations, in seconds.

        Args:
            share: Share of the durations, from 0 to 1; 0.5 is the median.

        Returns:
            The upper bound of the bin that contains the quantile, which is at most a quarter too
            high. 0 without durations; infinity for the last bin.

        Raises:
            ValueError: `share` is outside of [0, 1].
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {share!r}")
        if not self.count:
            return 0.0
        sums = list(accumulate(self.counts))
        index = bisect_left(sums, max(1, ceil(share * sums[-1])))
        return (*LATENCY_BOUNDS_SECONDS, inf)[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Snapshot of the counters of a store in this process, summed over all event loops."""

    num_requests: int = 0
    """Number of attempts, including retries. An attempt is one HTTP request, except for a copy that
    the service performs in several calls."""
    num_retries: int = 0
    """Number of attempts that were retries."""
    num_failures: int = 0
    """Number of attempts that failed or were cancelled."""
    num_throttled: int = 0
    """Number of attempts that the service throttled (HTTP 429 or 503)."""
    num_checksum_mismatches: int = 0
    """Number of reads whose bytes did not match their checksum, or their second copy, each logged
    as a warning. The bytes are read again, up to a limit."""
    bytes_received: int = 0
    """Bytes of object bodies that were received in all attempts, including incomplete bodies and
    those with wrong bytes."""
    bytes_unverified: int = 0
    """Bytes that were returned although nothing shows that they are right: those of whole objects
    without a checksum, and of ranges that were read once over plain http. All bytes, if
    `TransferOptions.verify` is False."""
    bytes_sent: int = 0
    """Bytes of object bodies that were sent, and whose requests succeeded."""
    num_in_flight: int = 0
    """Number of requests in flight now."""
    max_in_flight: int = 0
    """Maximum number of requests in flight now: `TransferOptions.max_in_flight`, or fewer after the
    service throttled requests."""
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Durations of successful attempts, from the request to the end of the response."""
    call_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Durations of successful calls as their callers saw them, with all attempts, pauses, stalls
    and repeated reads: of `head`, `get`, `get_into`, `get_range`, `get_ranges`, `put`, `compose`,
    `copy` and `delete`, and of each object of `get_many`, `put_many` and their batches."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of one object that were just received or sent."""

    uri: str
    """Uri of the object."""
    direction: Literal["received", "sent"]
    """Whether the bytes were received or sent."""
    num_bytes: int
    """Number of bytes since the last call for this object and direction: one range, one part, or a
    whole small object. Bytes count again when they are read again, after a lost connection or a
    wrong checksum."""


class ProgressHook(Protocol):
    """Function that is called on the event loop when bytes of objects were received or sent.

    It must return quickly, and must not block. If it raises, the request of the bytes fails.
    """

    def __call__(self, progress: Progress, /) -> None:
        """Process the report of one transfer."""
        ...
