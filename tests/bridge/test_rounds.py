"""Processes that come and go around a store that is at work: both sides go on, and nothing mixes.

`AIOFLUX_TEST_ROUNDS` sets the number of rounds of each test; the suite runs fewer.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer
from tests.bridge.scripts import LIMIT_SECONDS, ROOT, finish, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(LIMIT_SECONDS + 20), pytest.mark.more]

NUM_KEYS = 40
ROUNDS = os.environ.get("AIOFLUX_TEST_ROUNDS", "")


def content(key: str, num_loops: int) -> bytes:
    """Return the bytes of a key, which are those of no other anywhere."""
    # With several loops, four keys are large, because only large bodies are spread.
    is_large = num_loops > 1 and key[-1] == "7"
    size = 7_000_000 if is_large else random.Random(key).randrange(1, 200_000)
    word = f"<{key}>".encode()
    return (word * (size // len(word) + 1))[:size]


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest, num_loops: int) -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",), tls=request.param == "https") as running_server:
        for at in range(NUM_KEYS):
            running_server.put("bucket", f"p/{at:02}", content(f"{at:02}", num_loops))
        yield running_server


CHECKS = """
import asyncio, gc, random, signal, time
from aioflux import _bridge

ROUNDS = int(sys.argv[2])
keys = [f"{at:02}" for at in range(40)]

def content(key):
    is_large = num_loops > 1 and key[-1] == "7"
    size = 7_000_000 if is_large else random.Random(key).randrange(1, 200_000)
    word = f"<{key}>".encode()
    return (word * (size // len(word) + 1))[:size]

expected = {key: content(key) for key in keys}

def check(store, rng):
    some = [*rng.sample(keys, 8), "07"]
    for key, data in store.get_many(some):
        assert data == expected[key], key
    key = rng.choice(keys)
    assert store.get_range(key, start=0, end=1000) == expected[key][:1000]
    buffer = bytearray(len(expected[key]))
    assert store.get_into(key, buffer) == len(buffer)
    assert buffer == expected[key]
    own = f"own/{os.getpid()}-{threading.get_ident()}"
    store.put(own, own.encode() * 999)
    assert store.get(own) == own.encode() * 999
    assert_spread()

async def check_awaiting(store, rng):
    async for key, data in store.get_many([*rng.sample(keys, 8), "07"]):
        assert data == expected[key], key
    own = f"own/{os.getpid()}-async"
    await store.put(own, own.encode() * 999)
    assert await store.get(own) == own.encode() * 999
    assert_spread()

def open_awaiting():
    return aioflux.open_store("gs://bucket/p", transfer=options, **settings)

def wait(child, number):
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if number % 8 == 2 else 0), (number, status)
"""

FORKS = """
def hammer(stop, failures, seed):
    rng = random.Random(seed)
    try:
        while not stop.is_set():
            check(store, rng)
    except BaseException as exc:
        failures.append(exc)
        raise

def spin(stop):
    # Keeps the loop's thread in Python code, so that many forks find it there.
    async def work():
        until = time.monotonic() + 0.003
        while time.monotonic() < until:
            pass
    while not stop.is_set():
        _bridge.run(work())
        time.sleep(0.005)

def child(number, to_parent):
    rng = random.Random(number)
    kind = number % 8
    if kind == 1:  # a store of its own
        with aioflux.sync.open_store("gs://bucket/p", transfer=options, **settings) as own:
            check(own, rng)
    elif kind == 2:  # killed in the middle
        check(store, rng)
        os.write(to_parent, b"1")
        while True:
            check(store, rng)
    elif kind == 3:  # a loop of its own
        async def main():
            async with open_awaiting() as own:
                await check_awaiting(own, rng)
        asyncio.run(main())
    elif kind == 4:  # a grandchild
        grandchild = os.fork()
        check(store, rng)
        if not grandchild:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    elif kind == 5:  # collects what it can
        gc.collect()
        check(store, rng)
        gc.collect()
    else:
        check(store, rng)

def fork(number):
    from_child, to_parent = os.pipe()
    pid = os.fork()
    if not pid:
        # What goes wrong ends the child with a traceback and a status that is not 0.
        child(number, to_parent)
        sys.stdout.flush()
        if number % 2:
            os._exit(0)
        sys.exit(0)
    if number % 8 == 2:
        assert os.read(from_child, 1)
        os.kill(pid, signal.SIGKILL)
    os.close(from_child)
    os.close(to_parent)
    return pid

check(store, random.Random(0))
stop, failures = threading.Event(), []
threads = [threading.Thread(target=hammer, args=(stop, failures, seed)) for seed in range(2)]
threads.append(threading.Thread(target=spin, args=(stop,)))
for thread in threads:
    thread.start()
rng = random.Random(1)
for number in range(ROUNDS):
    batches = store.get_batches(keys)
    taken = next(batches)
    if number % 8 == 6:
        # The lock is held by a thread that does not exist in the child.
        lock, held, release = _bridge._bridge._lock, threading.Event(), threading.Event()
        def hold():
            with lock:
                held.set()
                release.wait()
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        pid = fork(number)
        release.set()
        holder.join()
    else:
        pid = fork(number)
    # What was under way at the fork goes on.
    rest = [pair for batch in batches for pair in batch]
    assert [key for key, _ in taken + rest] == keys
    assert all(data == expected[key] for key, data in taken + rest)
    check(store, rng)
    wait(pid, number)
    assert not failures
stop.set()
for thread in threads:
    thread.join()
assert not failures
store.close()
say("done")
"""


def test_rounds_of_forks(server: GCSServer) -> None:
    """While threads read and write, in eight kinds of children."""
    with running(CHECKS + FORKS, server, ROUNDS or "8") as process:
        assert finish(process) == ["done"]
    assert server.stats.open_uploads == 0


AWAITING_FORKS = """
import multiprocessing
processes = multiprocessing.get_context("fork")

def child(store, number):
    rng = random.Random(number)
    if number % 3 == 0:  # the parent's store on a loop of its own
        asyncio.run(check_awaiting(store, rng))
    elif number % 3 == 1:  # a store of its own
        async def main():
            async with open_awaiting() as own:
                await check_awaiting(own, rng)
        asyncio.run(main())
    else:  # the blocking face
        check(aioflux.sync.Store(store), rng)

async def hammer(store, stop, seed):
    rng = random.Random(seed)
    while not stop.is_set():
        await check_awaiting(store, rng)

async def main():
    async with open_awaiting() as store, asyncio.TaskGroup() as group:
        stop = asyncio.Event()
        for seed in range(4):
            group.create_task(hammer(store, stop, seed))
        for number in range(ROUNDS):
            reading = asyncio.create_task(check_awaiting(store, random.Random(number)))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            process = processes.Process(target=child, args=(store, number))
            process.start()
            await reading
            await asyncio.to_thread(process.join)
            assert process.exitcode == 0
            process.close()
        stop.set()

asyncio.run(main())
say("done")
"""


def test_rounds_of_forks_from_a_running_loop(server: GCSServer) -> None:
    """While its tasks read and write."""
    with running(CHECKS + AWAITING_FORKS, server, ROUNDS or "6") as process:
        assert finish(process) == ["done"]


MAIN = """
import multiprocessing

def work(number, store):
    check(store, random.Random(number))
    return os.getpid()

if __name__ == "__main__":
    method, per_process = sys.argv[3], int(sys.argv[4])
    processes = multiprocessing.get_context(method)
    if method == "forkserver":
        # Forked from a server that has imported all of it, and perhaps more than it should.
        processes.set_forkserver_preload(["aioflux.sync", "aioflux._services.gcs.service"])
    check(store, random.Random(0))
    stop, failures = threading.Event(), []
    def hammer():
        rng = random.Random(1)
        try:
            while not stop.is_set():
                check(store, rng)
        except BaseException as exc:
            failures.append(exc)
            raise
    thread = threading.Thread(target=hammer)
    thread.start()
    with processes.Pool(2, maxtasksperchild=per_process) as pool:
        # The store goes along with every task, and is opened anew for it.
        ids = pool.starmap(work, ((at, store) for at in range(ROUNDS)), chunksize=1)
        check(store, random.Random(2))
        pool.close()
        pool.join()
    stop.set()
    thread.join()
    assert not failures
    assert len(ids) == ROUNDS and os.getpid() not in ids
    store.close()
    say("done", len(set(ids)))
"""


@pytest.mark.parametrize(
    ("method", "server"), [("spawn", "https"), ("forkserver", "http")], indirect=["server"]
)
def test_rounds_of_tasks_in_other_processes(server: GCSServer, tmp_path: Path, method: str) -> None:
    """The store pickles to them while the parent reads."""
    from tests.bridge.scripts import PRELUDE

    rounds = int(ROUNDS or "8")
    per_process = rounds // 4 if method == "spawn" and not ROUNDS else max(1, rounds // 40)
    script = tmp_path / "main.py"
    script.write_text(PRELUDE + CHECKS + MAIN)
    trust = {"SSL_CERT_FILE": str(server.ca_file)} if server.url.startswith("https") else {}
    done = subprocess.run(
        [sys.executable, str(script), server.url, str(rounds), method, str(per_process)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, **trust, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    word, num_processes = done.stdout.split()
    assert word == "done"
    assert int(num_processes) >= 4
