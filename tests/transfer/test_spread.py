"""Large bodies over several event loops: one set of limits, errors, cancellation, forks, exit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import PermissionDeniedError, RetryPolicy, TransferOptions
from aioflux._concurrency.loop_threads import loop_threads, run_on
from aioflux._transfer.session import Spread
from aioflux.testing import GCSServer
from tests.loops import OTHER_LOOPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.store import Store

MIB = 1024 * 1024
DATA = bytes(range(256)) * (24 * MIB // 256)
OPTIONS = TransferOptions(num_loops=3, range_size_bytes=2 * MIB, part_size_bytes=5 * MIB)


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=["bucket"]) as server:
        yield server


def open_store(server: GCSServer, **settings: Any) -> Store:
    settings = {"transfer": OPTIONS, "credentials": "anonymous", **settings}
    return aioflux.open_store("gs://bucket/", endpoint_url=server.url, **settings)


async def test_ranges_and_parts_are_spread(server: GCSServer, body_threads: list[str]) -> None:
    async with open_store(server) as store:
        async with store.open_writer("large") as writer:
            await writer.write(DATA)
        assert await store.get("large") == DATA
        assert store.stats.bytes_sent == store.stats.bytes_received == len(DATA)
        assert store.stats.num_in_flight == 0
    home = threading.current_thread().name
    assert set(body_threads) == {home} | OTHER_LOOPS


async def test_small_bodies_stay_on_the_loop_of_the_caller(
    server: GCSServer, body_threads: list[str]
) -> None:
    async with open_store(server) as store:
        await asyncio.gather(*(store.put(f"{number}", b"small") for number in range(20)))
        assert [data async for _, data in store.get_many(store.list())] == [b"small"] * 20
    assert set(body_threads) <= {threading.current_thread().name}


async def test_one_loop_starts_no_other(server: GCSServer, body_threads: list[str]) -> None:
    async with open_store(server, transfer=TransferOptions(range_size_bytes=MIB)) as store:
        await store.put("large", DATA)
        assert await store.get("large") == DATA
    assert set(body_threads) == {threading.current_thread().name}


async def test_retries_have_one_count(server: GCSServer) -> None:
    server.put("bucket", "large", DATA)
    server.faults.add("objects.media", status=503, times=5)
    async with open_store(server, retry=RetryPolicy(initial_seconds=0.01)) as store:
        assert await store.get("large") == DATA
        assert store.stats.num_retries == 5


async def test_an_error_of_another_loop_is_raised(server: GCSServer) -> None:
    server.put("bucket", "large", DATA)
    async with open_store(server) as store:
        meta = await store.head("large")
        with (
            server.faults.inject("objects.media", status=403),
            pytest.raises(PermissionDeniedError, match="gs://bucket/large"),
        ):
            await store.get(meta)
        assert store.stats.num_in_flight == 0
        assert await store.get(meta) == DATA


async def test_a_cancelled_caller_waits_for_the_other_loop() -> None:
    started = threading.Event()
    events: list[str] = []

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.2)
            events.append("ended")

    task = asyncio.create_task(run_on(loop_threads(1)[0], work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["ended"]


async def test_a_failed_call_is_an_error_of_the_caller() -> None:
    def work() -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_on(loop_threads(1)[0], work)


async def test_a_cancelled_close_closes_the_service_of_the_caller() -> None:
    closed: list[str] = []

    class SlowService:
        def __init__(self, name: str) -> None:
            self.name = name

        async def aclose(self) -> None:
            await asyncio.sleep(0.05 if self.name == "other" else 0)
            closed.append(self.name)

        async def send(self) -> None:
            await asyncio.sleep(0.01)

    spread = Spread(SlowService("home"), [SlowService("other")])  # type: ignore[arg-type, list-item]
    for _ in range(2):
        await asyncio.gather(*(spread.run(MIB, lambda each: each.send()) for _ in range(4)))  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(spread.aclose(), 0.01)
    assert closed == ["home"]


def test_asynchronous_credentials_are_rejected(server: GCSServer) -> None:
    async def token() -> tuple[str, float]:
        return "token", 0.0

    with pytest.raises(ValueError, match="num_loops=3 does not work with asynchronous credentials"):
        open_store(server, credentials=token)


async def test_an_exit_in_a_task_does_not_stop_the_loop() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def work() -> int:
        return 7

    loop = loop_threads(1)[0]
    with pytest.raises(SystemExit):
        await run_on(loop, leave)
    assert await run_on(loop, work) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_the_first_threads_of_a_forked_child_share_its_loops() -> None:
    script = """
import os, sys, threading
from aioflux._concurrency.loop_threads import loop_threads
parent = loop_threads(2)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
sys.setswitchinterval(1e-6)
found, barrier = [], threading.Barrier(8)
def start():
    barrier.wait()
    found.append(loop_threads(2))
threads = [threading.Thread(target=start) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
names = [each.name for each in threading.enumerate() if each.name.startswith("aioflux")]
os._exit(0 if found == [found[0]] * 8 and found[0] != parent and len(names) == 2 else 1)
"""
    run = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert run.returncode == 0


FORK = """
import asyncio, os, sys
import aioflux
from aioflux.sync import open_store
transfer = aioflux.TransferOptions(num_loops=3, range_size_bytes=2**21)
options = {"endpoint_url": sys.argv[1], "credentials": "anonymous", "transfer": transfer}
store = open_store("gs://bucket/", **options)
data = store.get("large")
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
assert store.get("large") == data
again = open_store("gs://bucket/", **options)
assert again.get("large") == data
again.close()
if child:
    print("equal", len(data))
else:
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_uses_loops_of_its_own(server: GCSServer) -> None:
    server.put("bucket", "large", DATA)
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-c", FORK, server.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, f"equal {len(DATA)}\n"), run.stderr
    assert "Error" not in run.stderr
