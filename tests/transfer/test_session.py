"""One request within the limits: places, counters, progress."""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from typing import Any

import pytest

import aioflux
from aioflux import CleanupTimeouts, NotFoundError, Progress, StorageError, TransientError
from aioflux._services.base import Body
from aioflux._transfer.admission import AdaptiveLimit, Counters, StoreCounters
from aioflux.options import longest_cleanup
from aioflux.store import sessions_of
from aioflux.testing import GCSServer
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import PART, ScriptedService, pattern, refused_for_good


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def throttled(times: int) -> Any:
    numbers = count(1)

    async def attempt() -> str:
        if next(numbers) <= times:
            raise TransientError("slow down", status=429)
        return "done"

    return attempt


async def test_a_backoff_holds_no_place_but_keeps_its_bytes() -> None:
    retry = aioflux.RetryPolicy(initial_seconds=60, max_seconds=60)
    scripted = ScriptedService("backoff")
    session = scripted.new_store(retry=retry, max_in_flight=1, max_in_flight_bytes=100).session
    waiting = asyncio.create_task(session.call("a", throttled(1), num_bytes=60))
    await settle()
    assert session.admission.slots.num_held == 0
    assert session.admission.bytes.held_bytes == 60
    assert await session.call("b", throttled(0), num_bytes=40) == "done"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert session.admission.bytes.held_bytes == 0
    assert session.admission.slots.num_held == 0


async def test_429_and_503_shrink_the_limit_and_success_grows_it_back() -> None:
    session = ScriptedService("throttle").new_store(max_in_flight=4).session
    await session.call("a", throttled(2))
    assert session.admission.slots.limit == 2  # halved twice to 1, and grown by the success
    for _ in range(20):
        await session.call("a", throttled(0))
    assert session.admission.slots.limit == 4


async def test_another_error_does_not_shrink_the_limit() -> None:
    scripted = ScriptedService("not-throttled")
    scripted.put("a", b"data")
    scripted.service.fail("head", Fault(kind="refuse", error=TransientError("no", status=500)))
    await scripted.store.head("a")
    assert scripted.store.stats.max_in_flight == scripted.store.transfer.max_in_flight


@pytest.mark.usefixtures("clock")
async def test_waiting_in_line_does_not_count_against_the_deadline() -> None:
    scripted = ScriptedService("line")
    retry = aioflux.RetryPolicy(deadline_seconds=0.05)
    session = scripted.new_store(retry=retry, max_in_flight=1, max_in_flight_bytes=100).session
    limits = session.admission
    await limits.slots.acquire()
    waiting = asyncio.create_task(session.call("a", throttled(0)))
    _, pending = await asyncio.wait([waiting], timeout=0.2)
    assert pending
    limits.slots.on_throttled(limits.slots.num_cuts)
    limits.slots.release()
    assert await waiting == "done"


async def test_attempts_retries_failures_and_throttling_are_counted() -> None:
    store = ScriptedService("count").store
    session = store.session
    await session.call("a", throttled(2))
    with pytest.raises(NotFoundError):
        await store.head("b")
    stats = store.stats
    assert (stats.num_requests, stats.num_retries) == (4, 2)
    assert (stats.num_failures, stats.num_throttled, stats.num_in_flight) == (3, 2, 0)
    assert stats.latency.count == 1


async def test_bytes_that_came_and_went_are_counted_also_of_bodies_that_broke() -> None:
    session = ScriptedService("bytes").store.session

    numbers = count(1)

    async def attempt() -> Body:
        if next(numbers) == 1:
            raise TransientError("broke", num_bytes_received=7)
        return Body(bytes(20), 20, "", None, lambda: None)  # type: ignore[arg-type,return-value]

    async def written() -> str:
        return "meta"

    await session.call("a", attempt, num_bytes=20)
    await session.call("a", written, num_bytes=30)
    assert (session.counters.bytes_received, session.counters.bytes_sent) == (
        27,
        30,
    )


async def test_a_request_under_way_is_counted_until_it_is_cancelled() -> None:
    session = ScriptedService("in-flight").store.session

    async def attempt() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(session.call("a", attempt))
    await settle()
    assert session.counters.num_in_flight == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (session.counters.num_in_flight, session.counters.num_failures) == (
        0,
        1,
    )


@pytest.mark.parametrize("face", ["async", "sync"])
def test_the_hook_hears_of_all_bytes_of_each_object(face: str) -> None:
    heard: list[Progress] = []
    uri = f"memory://progress-{face}/p"
    options = aioflux.TransferOptions(range_size_bytes=3_000_000)
    data = pattern(10_000_000)

    async def play() -> aioflux.StoreStats:
        async with aioflux.open_store(uri, transfer=options, progress=heard.append) as store:
            await store.put("a", data)
            assert await store.get("a") == data
            return store.stats

    def play_sync() -> aioflux.StoreStats:
        with aioflux.sync.open_store(uri, transfer=options, progress=heard.append) as store:
            store.put("a", data)
            assert store.get("a") == data
            return store.stats

    stats = asyncio.run(play()) if face == "async" else play_sync()
    for direction in ("sent", "received"):
        steps = [each.num_bytes for each in heard if each.direction == direction]
        assert sum(steps) == len(data)
    assert {each.uri for each in heard} == {f"{uri}/a"}
    assert sum(each.direction == "received" for each in heard) == 4
    assert stats.bytes_received == stats.bytes_sent == len(data)


def test_stats_are_summed_over_loops_that_ended() -> None:
    store = aioflux.open_store("memory://loops")

    async def play() -> None:
        await store.put("a", b"1234")

    for _ in range(3):
        asyncio.run(play())
    assert store.stats.bytes_sent == 12
    assert store.stats.num_requests == 3
    assert store.stats.max_in_flight == store.transfer.max_in_flight, "of no loop that ended"


def test_a_pickled_store_leaves_its_hook_and_its_counters_behind() -> None:
    import pickle

    store = aioflux.open_store("memory://pickled", progress=lambda progress: None)
    again = pickle.loads(pickle.dumps(store))
    assert again.stats.num_requests == 0


def test_the_sums_of_a_loop_outlive_it_and_those_of_others_go_on() -> None:
    tally = StoreCounters()
    loops = [asyncio.new_event_loop() for _ in range(3)]
    for num, loop in enumerate(loops):
        counters = Counters(num_requests=10**num, num_in_flight=1, slowest=(num, f"{num}.bin"))
        tally.add_loop(loop, counters, AdaptiveLimit(4))
    loops[1].close()
    late = asyncio.new_event_loop()
    tally.add_loop(late, Counters(num_requests=1000), AdaptiveLimit(4))
    stats = tally.stats("memory://tally", max_in_flight=4)
    assert stats.num_requests == 1111
    assert stats.num_in_flight == 2  # what a loop left undone ended with it
    assert stats.max_in_flight == 3 * 4
    assert (stats.slowest_call_seconds, stats.slowest_call_uri) == (2, "memory://tally/2.bin")
    for loop in (loops[0], loops[2], late):
        loop.close()
    assert tally.stats("memory://tally", max_in_flight=4).max_in_flight == 4


async def test_an_error_of_the_hook_fails_the_request_and_frees_its_place() -> None:
    scripted = ScriptedService("hook")

    def refuse(_: Progress) -> None:
        raise ZeroDivisionError

    store = scripted.new_store(progress=refuse)
    with pytest.raises(ZeroDivisionError):
        await store.put("a", b"30")
    assert store.is_clean()


async def test_a_writer_that_cannot_be_aborted_does_not_keep_its_store_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scripted = ScriptedService("closing")
    store = scripted.store
    scripted.service.fail("abort_upload", refused_for_good())

    async def write() -> None:
        async with store.open_writer("a") as writer:
            await writer.write(pattern(2 * PART))
            await store.aclose()
            assert "a writer was open when its store was closed" in caplog.text
            await writer.write(b"more")

    with pytest.raises(StorageError, match="its store was closed"):
        await write()


def test_each_clean_up_time_is_the_longest_of_all_stores() -> None:
    """At the end of the process, which serves several stores at once."""
    longest = longest_cleanup(
        [
            CleanupTimeouts(interrupted_seconds=20.0),
            CleanupTimeouts(total_seconds=50.0, close_seconds=1.0),
        ]
    )
    assert longest == CleanupTimeouts(interrupted_seconds=20.0, total_seconds=50.0)
    assert longest_cleanup([]) == CleanupTimeouts()


@pytest.mark.skipif(not hasattr(sys, "getrefcount"), reason="counts references")
def test_the_next_use_releases_the_memory_of_an_ended_loop() -> None:
    """The timer of the memory ended with the loop, which the caller may still reference."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def read() -> bytes:
        loops.append(asyncio.get_running_loop())
        try:
            return await store.get("large")
        finally:
            # `Store.aclose` would release the memory, too.
            await sessions_of(store).current().service.aclose()

    async def use() -> None:
        async with store:
            await store.put("small", b"1")

    with GCSServer(buckets=["bucket"]) as server:
        server.put("bucket", "large", bytes(4 << 20))
        store = aioflux.open_store("gs://bucket", endpoint_url=server.url)
        data = asyncio.run(read())
        num_references = sys.getrefcount(data)
        asyncio.run(use())
        assert sys.getrefcount(data) == num_references - 1
