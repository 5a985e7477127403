"""What a store tells of its work."""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import LatencyHistogram, StoreStats
from aioflux._values.stats import LATENCY_BOUNDS_SECONDS


def histogram(times: list[float]) -> LatencyHistogram:
    counts = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
    for time in times:
        counts[bisect_left(LATENCY_BOUNDS_SECONDS, time)] += 1
    return LatencyHistogram(tuple(counts), sum(times))


@given(
    st.lists(st.floats(1e-4, 800), min_size=1, max_size=50),
    st.floats(0, 1),
)
def test_a_quantile_is_at_most_a_quarter_too_high(times: list[float], share: float) -> None:
    exact = sorted(times)[max(0, math.ceil(share * len(times)) - 1)]
    assert exact <= histogram(times).quantile(share) <= exact * 1.25 + 1e-12


def test_what_took_longer_than_the_last_bound_has_no_bound() -> None:
    assert histogram([0.01, 1000.0]).quantile(1.0) == math.inf


def test_without_attempts_there_is_no_time() -> None:
    empty = LatencyHistogram()
    assert (empty.count, empty.mean_seconds, empty.quantile(0.5)) == (0, 0.0, 0.0)


def test_the_mean_is_exact() -> None:
    assert histogram([0.5, 1.5]).mean_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_from_zero_to_one(share: float) -> None:
    with pytest.raises(ValueError, match="share must be from 0 to 1"):
        LatencyHistogram().quantile(share)


def test_stats_pickle() -> None:
    stats = StoreStats(num_requests=3, latency=histogram([0.1, 0.2, 0.3]))
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_stats_are_printed_in_eleven_lines() -> None:
    stats = StoreStats(
        num_requests=1234,
        num_retries=12,
        num_failures=12,
        failures={"stalled": 3, "HTTP 503": 9},
        bytes_received=1_096_000_000,
        seconds=10.0,
        max_in_flight=64,
        latency=histogram([0.01] * 98 + [0.5] * 2),
        slowest_call_seconds=1.23456,
        slowest_call_uri="gs://bucket/a",
    )
    lines = str(stats).splitlines()
    assert len(lines) == 11
    assert "retries     12 (failures: 9 x HTTP 503, 3 x stalled)" in lines
    assert "received    1.0 GiB, 104.5 MiB/s" in lines
    assert "sent        0 B, 0 B/s" in lines
    assert "calls       none succeeded" in lines
    assert lines[-1] == "slowest     1.235 s, gs://bucket/a"
    assert str(StoreStats()).endswith("slowest     0.000 s, no call")
    [attempts] = [line for line in lines if line.startswith("attempts")]
    assert attempts.startswith("attempts    100 succeeded; median 11.7 ms, p99 ")
    assert attempts.endswith("mean 19.8 ms")
    assert len(str(StoreStats()).splitlines()) == 11
    assert "TiB" in str(StoreStats(bytes_sent=10**15))


def test_stats_as_a_dict_are_flat_numbers() -> None:
    stats = StoreStats(num_requests=3, failures={"stalled": 3}, latency=histogram([0.5]))
    stats = replace(stats, slowest_call_seconds=0.6, slowest_call_uri="gs://bucket/a")
    numbers = stats.as_dict()
    assert numbers["num_requests"] == numbers["failures/stalled"] == 3
    assert numbers["latency_count"] == 1
    assert numbers["latency_mean_seconds"] == numbers["latency_p50_seconds"] == 0.5
    assert numbers["call_latency_p99_seconds"] == 0
    assert numbers["slowest_call_seconds"] == 0.6
    assert all(isinstance(value, int | float) for value in numbers.values())
