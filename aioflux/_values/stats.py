"""Counters of a store, and the protocol of progress hooks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import ceil, inf, ldexp
from typing import Literal, Protocol

LATENCY_BOUNDS_SECONDS = tuple(
    ldexp(1 + quarter / 4, octave) for octave in range(-14, 10) for quarter in range(4)
)
"""Upper bounds of the bins of the histogram, except the last bin, in seconds: 61 us to 896 s. Each
octave (factor 2) has four bounds, so that a quantile is at most a quarter too high."""


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


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
    failures: Mapping[str, int] = field(default_factory=dict)
    """Numbers of failed attempts after which another one may follow, by cause: the HTTP status
    ("HTTP 503"), "lost connection", "stalled", "unreachable", "unknown host", "malformed",
    "wrong bytes" or "other"."""
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
    seconds: float = 0.0
    """Time since the store was opened, in seconds."""
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Durations of successful attempts, from the request to the end of the response."""
    call_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Durations of successful calls as their callers saw them, with all attempts, pauses, stalls
    and repeated reads: of `head`, `get`, `get_into`, `get_range`, `get_ranges`, `put`,
    `upload_file`, `download_file`, `compose`, `copy` and `delete`, and of each object of
    `get_many`, `put_many` and their batches."""
    slowest_call_seconds: float = 0.0
    """Duration of the slowest of these calls, in seconds."""
    slowest_call_uri: str = ""
    """Uri of its object; empty without calls."""

    def as_dict(self) -> dict[str, float]:
        """Return the numbers as a flat dict, for loggers of metrics.

        Failures have the names `failures/<cause>`; a histogram of latencies has its count, mean,
        median and 99 % quantile, in seconds. `slowest_call_uri`, which is no number, is left out.
        """
        numbers: dict[str, float] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, LatencyHistogram):
                numbers[f"{each.name}_count"] = value.count
                numbers[f"{each.name}_mean_seconds"] = value.mean_seconds
                numbers[f"{each.name}_p50_seconds"] = value.quantile(0.5)
                numbers[f"{each.name}_p99_seconds"] = value.quantile(0.99)
            elif each.name == "failures":
                numbers |= {f"failures/{cause}": count for cause, count in value.items()}
            elif each.name != "slowest_call_uri":
                numbers[each.name] = value
        return numbers

    def __str__(self) -> str:
        """Return the numbers in eleven lines, for people."""
        causes = sorted(self.failures.items(), key=lambda item: (-item[1], item[0]))
        reasons = ", ".join(f"{count:,} x {cause}" for cause, count in causes)
        rows = {
            "open for": f"{self.seconds:.1f} s",
            "requests": f"{self.num_requests:,}, {self.num_failures:,} of them failed",
            "in flight": f"{self.num_in_flight} of at most {self.max_in_flight}",
            "received": self._volume(self.bytes_received),
            "sent": self._volume(self.bytes_sent),
            "retries": f"{self.num_retries:,}" + (f" (failures: {reasons})" if reasons else ""),
            "throttled": f"{self.num_throttled:,}",
            "wrong bytes": f"{self.num_checksum_mismatches:,} reads repeated, "
            f"{format_size(self.bytes_unverified)} not verified",
            "calls": _describe(self.call_latency),
            "attempts": _describe(self.latency),
            "slowest": f"{self.slowest_call_seconds:.3f} s, {self.slowest_call_uri or 'no call'}",
        }
        return "\n".join(f"{name:<12}{text}" for name, text in rows.items())

    def _volume(self, num_bytes: int) -> str:
        rate = f", {format_size(num_bytes / self.seconds)}/s" if self.seconds else ""
        return f"{format_size(num_bytes)}{rate}"


def format_size(num_bytes: float) -> str:
    """Format a number of bytes in units of 1024: `40.0 MiB`."""
    power = 0
    while num_bytes >= 1023.95 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.1f} {_UNITS[power]}" if power else f"{num_bytes:.0f} B"


def _describe(latency: LatencyHistogram) -> str:
    """Describe a histogram of successful calls or attempts."""
    if not latency.count:
        return "none succeeded"
    times = (latency.quantile(0.5), latency.quantile(0.99), latency.mean_seconds)
    median, p99, mean = (_format_seconds(seconds) for seconds in times)
    return f"{latency.count:,} succeeded; median {median}, p99 {p99}, mean {mean}"


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


def _format_seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
