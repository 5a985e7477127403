"""Retries and slow requests in the log: the first of a cause at once, then counts."""

from __future__ import annotations

import asyncio
import logging
import re
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux._transfer.event_log import INTERVAL_SECONDS, EventLog
from aioflux.testing import GCSServer
from tests.transfer.test_retry import Time

if TYPE_CHECKING:
    from collections.abc import Iterator

# --- which lines there are ----------------------------------------------------------------------


def test_the_first_of_a_cause_is_logged_at_once_and_the_others_are_counted() -> None:
    log = EventLog("were retried")
    assert log.due_at == inf
    assert log.add("HTTP 503", "a", 5.0, num_requests=1)
    assert [log.add("HTTP 503", "b", 6.0, num_requests=2) for _ in range(7)] == [False] * 7
    assert log.add("stalled", "c", 7.0, num_requests=9)
    assert not log.add("stalled", "d", 8.0, num_requests=10)
    assert log.pop(14.9, num_requests=2000) == ""
    assert log.due_at == 15.0
    line = "10 of 2,000 requests were retried: 8 x HTTP 503, 2 x stalled; last: d"
    assert log.pop(15.0, num_requests=2000) == line


def test_a_cause_that_goes_on_is_one_line_for_each_interval() -> None:
    log, lines = EventLog("failed"), []
    for second in range(100):
        lines.append(log.pop(second, num_requests=second))
        log.add("stalled", "x", second, num_requests=second + 1)
    assert sum(map(bool, lines)) == 9
    assert lines[20] == "10 of 10 requests failed: 10 x stalled; last: x"


def test_a_cause_is_new_again_after_an_interval_without_it() -> None:
    log = EventLog("failed")
    for start in (0.0, 100.0):
        assert log.add("stalled", "x", start, num_requests=1)
        assert log.pop(start + 10, num_requests=1) == "", "the one event was logged"
        assert not log.add("stalled", "x", start + 15, num_requests=2)
        assert log.pop(start + 20, num_requests=2).startswith("1 of 1 requests")
        assert log.pop(start + 30, num_requests=2) == ""
        assert log.due_at == inf


def test_the_rest_is_logged_at_the_end() -> None:
    log = EventLog("failed")
    for _ in range(2):
        log.add("stalled", "x", 0.0, num_requests=1)
    assert log.pop(inf, num_requests=1) == "2 of 2 requests failed: 2 x stalled; last: x"
    assert log.pop(inf, num_requests=1) == ""


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=50))
def test_each_event_is_logged_or_counted(events: list[tuple[str, float]]) -> None:
    log, now, num_logged, num_counted, times = EventLog("failed"), 0.0, 0, 0, []
    for cause, pause in [*events, ("", inf)]:
        now += pause
        if line := log.pop(now, num_requests=0):
            num_counted += int(line.split()[0])
            times.append(now)
        if cause:
            num_logged += log.add(cause, "x", now, num_requests=0)
    assert num_counted <= len(events) <= num_counted + num_logged
    assert all(b - a > INTERVAL_SECONDS - 1e-6 for a, b in pairwise(times))


# --- of real requests -----------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=["bucket"]) as server:
        server.put("bucket", "a", bytes(1000))
        yield server


def lines_of(caplog: pytest.LogCaptureFixture, name: str, level: int = logging.INFO) -> list[str]:
    records = [each for each in caplog.records if each.name == name and each.levelno >= level]
    return [each.getMessage() for each in records]


def open_store(server: GCSServer, clock: Time, **timeouts: Any) -> aioflux.Store:
    retry = aioflux.RetryPolicy(initial_seconds=0.001, max_attempts=20)
    store = aioflux.open_store(
        "gs://bucket",
        endpoint_url=server.url,
        retry=retry,
        timeouts=aioflux.Timeouts(**{"progress_seconds": 0.2} | timeouts),
    )
    store._sessions.clock = clock.clock
    return store


@pytest.mark.parametrize("is_batch", [False, True], ids=["get", "get_many"])
async def test_retries_are_a_line_for_each_cause_and_then_counts(
    server: GCSServer, caplog: pytest.LogCaptureFixture, is_batch: bool
) -> None:
    caplog.set_level(logging.DEBUG, "aioflux.retry")
    clock = Time()
    async with open_store(server, clock) as store:

        async def read() -> None:
            if is_batch:
                assert [len(data) async for _, data in store.get_many(["a"])] == [1000]
            else:
                assert len(await store.get("a")) == 1000

        await read()
        server.faults.add("*objects.get", status=503, times=8)
        server.faults.add("*objects.get", stall_at=100, times=2)
        await read()
        first = lines_of(caplog, "aioflux.retry")
        assert [line.split(",")[0] for line in first] == ["attempt 1 failed", "attempt 9 failed"]
        assert len(lines_of(caplog, "aioflux.retry", logging.DEBUG)) == 10
        clock.now += INTERVAL_SECONDS - 0.1
        await read()
        assert lines_of(caplog, "aioflux.retry") == first
        clock.now += 0.1
        await read()
    [line] = lines_of(caplog, "aioflux.retry")[2:]
    start = "gs://bucket/: 10 of 13 requests were retried: 8 x HTTP 503, 2 x stalled; last: could"
    assert line.startswith(start)
    assert "gs://bucket/a" in line


async def test_the_counts_are_logged_when_the_store_is_closed(
    server: GCSServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioflux.retry")
    async with open_store(server, Time()) as store:
        server.faults.add("*objects.get", status=503, times=3)
        await store.get("a")
        assert len(lines_of(caplog, "aioflux.retry")) == 1
    assert "3 of 4 requests were retried: 3 x HTTP 503" in lines_of(caplog, "aioflux.retry")[1]


SLOW_SECONDS = 0.4
FAULTS = {
    "receiving the response (download)": ("*objects.get", {"stall_at": 100, "stall_seconds": 1.0}),
    "waiting for the response to start (download)": ("*objects.get", {"delay_seconds": 1.0}),
    "waiting for the response to start (upload)": ("*objects.insert", {"delay_seconds": 1.0}),
}


async def transfer(store: aioflux.Store, phase: str, keys: list[str], *, is_batch: bool) -> None:
    """Read or write objects at the same time."""
    if "upload" in phase:
        await asyncio.gather(*(store.put(key, bytes(1000)) for key in keys))
    elif is_batch:
        assert len([key async for key, _ in store.get_many(keys)]) == len(keys)
    else:
        await asyncio.gather(*map(store.get, keys))


@pytest.mark.parametrize("phase", FAULTS)
@pytest.mark.parametrize("is_batch", [False, True], ids=["get", "get_many"])
async def test_slow_requests_are_a_line_with_uri_and_phase_and_then_counts(
    server: GCSServer, caplog: pytest.LogCaptureFixture, phase: str, is_batch: bool
) -> None:
    caplog.set_level(logging.INFO, "aioflux")
    keys = ["b0", "b1", "b2"]
    for key in keys:
        server.put("bucket", key, bytes(1000))
    timeouts = aioflux.Timeouts(slow_seconds=SLOW_SECONDS)
    async with aioflux.open_store(
        "gs://bucket", endpoint_url=server.url, timeouts=timeouts
    ) as store:
        await transfer(store, phase, keys, is_batch=is_batch)  # opens connections
        assert lines_of(caplog, "aioflux.requests") == []
        operation, fault = FAULTS[phase]
        with server.faults.inject(operation, times=3, **fault):
            await transfer(store, phase, keys, is_batch=is_batch)
        await transfer(store, phase, keys, is_batch=is_batch)
        words, kind = phase.removesuffix(")").split(" (")
        [line] = lines_of(caplog, "aioflux.requests")
        assert re.fullmatch(rf"{kind} of gs://bucket/b\d took \d+\.\d s, mostly {words}", line)
    summary = lines_of(caplog, "aioflux.requests")[1]
    start = f"gs://bucket/: 3 of 6 requests took over 0.4 s: 3 x {phase}; last: {kind} of gs://bu"
    assert summary.startswith(start)


@pytest.mark.parametrize(("slow_seconds", "num_lines"), [(1e-9, 1), (None, 0)])
async def test_none_switches_the_lines_off(
    caplog: pytest.LogCaptureFixture, slow_seconds: float | None, num_lines: int
) -> None:
    """And a request that is no HTTP request has no phase."""
    caplog.set_level(logging.INFO, "aioflux")
    timeouts = aioflux.Timeouts(slow_seconds=slow_seconds)
    async with aioflux.open_store("memory://slow", timeouts=timeouts) as store:
        await store.put("a", b"1")
    lines = lines_of(caplog, "aioflux.requests")
    assert len(lines) == num_lines
    assert all(re.fullmatch(r"upload of memory://slow/a took 0\.0 s", line) for line in lines)


# --- each request ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_batch", [False, True], ids=["get", "get_many"])
async def test_each_request_is_a_line_at_debug(
    server: GCSServer, caplog: pytest.LogCaptureFixture, is_batch: bool
) -> None:
    caplog.set_level(logging.DEBUG, "aioflux.requests")
    async with open_store(server, Time()) as store:
        for _ in range(2):  # small objects are read by callbacks when a connection is idle
            server.faults.add("*objects.get", status=503, times=1)
            await transfer(store, "download", ["a"], is_batch=is_batch)
        await store.put("c", bytes(1500))
        await store.list_all("none")
        with pytest.raises(aioflux.NotFoundError):
            await store.head("missing")
        server.faults.add("*objects.get", truncate_at=500, times=1)
        await transfer(store, "download", ["a"], is_batch=is_batch)
    lines = lines_of(caplog, "aioflux.requests", logging.DEBUG)
    number = r", \d+ bytes, \d+\.\d ms, attempt "
    once = [rf"GET gs://bucket/a: HTTP 503{number}1", rf"GET gs://bucket/a: HTTP 20[06]{number}2"]
    expected = [
        *once,
        *once,
        r"(PUT|POST) gs://bucket/c: HTTP 200, \d{4} bytes, \d+\.\d ms, attempt 1",
        rf"GET gs://bucket/none: HTTP 200{number}1",
        rf"GET gs://bucket/missing: HTTP 404{number}1",
        r"GET gs://bucket/a: no complete response, 0 bytes, \d+\.\d ms, attempt 1",
        r"GET gs://bucket/a: HTTP 20[06], 1000 bytes, \d+\.\d ms, attempt 2",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert sum(", 1000 bytes, " in line for line in lines) == 3
