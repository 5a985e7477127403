"""Composed reads in processes that end: Ctrl-C leaves no composite; a sweep deletes the others.

AIOFLUX_TEST_ROUNDS sets the number of SIGKILLs; 5 by default.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from aioflux.store import COMPOSITE_PREFIX
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Network
from tests.bridge.scripts import LIMIT_SECONDS, Watch, finish, line, running, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_ROUNDS = int(os.environ.get("AIOFLUX_TEST_ROUNDS", "5"))
STEPS = ("*objects.compose", "*objects.get", "*objects.delete")

READ = """
from aioflux.store import COMPOSITE_PREFIX
store = aioflux.sync.open_store(
    "gs://bucket/p", transfer=aioflux.TransferOptions(max_in_flight=8), **settings
)
def read(times):
    metas = list(store.list_all()) * times
    got = [pair for batch in store.fetch_composed(metas) for pair in batch]
    assert [(meta, data) for meta, data in got] == [(meta, meta.key.encode()) for meta in metas]
"""

KILLED = f"""{READ}
swept = store.clean(COMPOSITE_PREFIX, older_than_seconds=0)
assert not swept.errors
say(len(swept.removed))
times = int(sys.stdin.readline())
read(times)
store.close()
say("done")
"""


@pytest.fixture
def server() -> Iterator[GCSServer]:
    # A little latency, so that composites are there for a while.
    with GCSServer(buckets=("bucket",), network=Network(latency_seconds=0.005)) as running_server:
        for at in range(300):
            running_server.put("bucket", f"p/{at:03}", f"{at:03}".encode())
        yield running_server


def composites(server: GCSServer) -> list[str]:
    return [key for key in server.keys("bucket") if COMPOSITE_PREFIX in key]


def wait_until(server: GCSServer, num_delayed: int) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while server.faults.injected["delay"] < num_delayed:
        assert time.monotonic() < until
        time.sleep(0.002)


def test_the_next_start_sweeps_what_sigkill_left(server: GCSServer) -> None:
    rng = random.Random(NUM_ROUNDS)
    watch = Watch()
    server.app.hooks += (watch,)
    left, swept = [], []
    for _ in range(NUM_ROUNDS):
        with running(KILLED, server) as process:
            assert process.stdin is not None
            swept.append(int(line(process)))
            assert composites(server) == []
            process.stdin.write("1000\n")
            process.stdin.flush()
            step = rng.choice(STEPS)
            for _ in range(rng.randrange(1, 60)):
                watch.wait_for(step)
            process.kill()
            process.wait()
        wait_until_idle(server)
        left.append(len(composites(server)))
    with running(KILLED, server) as process:
        assert process.stdin is not None
        swept.append(int(line(process)))
        process.stdin.write("1\n")
        process.stdin.flush()
        assert finish(process) == ["done"]
    assert sum(swept) >= sum(left) > 0
    assert composites(server) == []


INTERRUPTED = f"""{READ}
read(1)
say("up")
for _ in sys.stdin:
    try:
        say("ready")
        read(1000)
    except KeyboardInterrupt:
        say("interrupted")
    sys.stdin.readline()
    read(1)
    say("usable")
store.close()
"""


def test_ctrl_c_leaves_no_composite(server: GCSServer) -> None:
    """Even if the service does not respond to open requests."""
    with running(INTERRUPTED, server) as process:
        assert process.stdin is not None
        assert line(process) == "up"
        for step in STEPS:
            for delay_seconds in (0.0, 0.3 if step.endswith("delete") else 3600.0):
                process.stdin.write("\n")
                process.stdin.flush()
                assert line(process) == "ready"
                aim = server.faults.injected["delay"] + 4
                server.faults.add(step, times=4, delay_seconds=delay_seconds)
                wait_until(server, aim)
                process.send_signal(signal.SIGINT)
                assert line(process) == "interrupted", (step, delay_seconds)
                assert composites(server) == [], (step, delay_seconds)
                server.faults.clear()
                process.stdin.write("\n")
                process.stdin.flush()
                assert line(process) == "usable", (step, delay_seconds)
        assert finish(process) == []


ASYNCHRONOUS = """
import asyncio
async def main():
    async with aioflux.open_store("gs://bucket/p", **settings) as store:
        metas = [meta async for meta in store.list()] * 1000
        say("up")
        async for batch in store.fetch_composed(metas):
            pass
try:
    asyncio.run(main())
except KeyboardInterrupt:
    say("interrupted")
"""


def test_ctrl_c_leaves_no_composite_of_a_loop(server: GCSServer) -> None:
    watch = Watch()
    server.app.hooks += (watch,)
    with running(ASYNCHRONOUS, server) as process:
        assert line(process) == "up"
        for _ in range(20):
            watch.wait_for(STEPS[0])
        process.send_signal(signal.SIGINT)
        assert finish(process) == ["interrupted"]
    assert composites(server) == []


DROPPED = f"""{READ}
batches = store.fetch_composed(list(store.list_all()) * 1000)
next(batches)
say("begun")
"""


def test_an_iteration_that_the_end_of_the_process_meets_leaves_none(server: GCSServer) -> None:
    with running(DROPPED, server) as process:
        assert finish(process) == ["begun"]
    assert composites(server) == []
