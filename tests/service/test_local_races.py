"""Writers of one object in several processes: every condition holds, and one of them wins."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import AlreadyExistsError, NotFoundError, PreconditionFailedError, StorageError
from aioflux import sync as blocking
from aioflux._services.base import ListRequest, Precondition, WriteRequest
from aioflux._services.local.walk import TEMPORARY, temporary_files
from aioflux._services.local.write import Stop, link_new, locked, replace_file
from tests.service.opening import open_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

NUM_PROCESSES = 3
NUM_ROUNDS = 25
processes = multiprocessing.get_context("forkserver")


def create(uri: str, number: int, barrier: Barrier, results: Any) -> None:
    """Create each key at the same moment as others do."""
    won = []
    with blocking.open_store(uri) as store:
        for at in range(NUM_ROUNDS):
            barrier.wait(200)
            try:
                if at % 2:
                    store.put(f"d{at}/k", f"{number}".encode(), mode="create")
                else:
                    with store.open_writer(f"d{at}/k", mode="create") as writer:
                        writer.write(f"{number}".encode())
                won.append(at)
            except AlreadyExistsError:
                pass
    results.put((number, won))


def increment(uri: str, number: int, barrier: Barrier, results: Any) -> None:
    """Add one to the object, many times, by reading and replacing what was read."""
    won = []
    with blocking.open_store(uri) as store:
        barrier.wait(200)
        while len(won) < NUM_ROUNDS:
            meta = store.head("counter")
            try:
                count = int(store.get(meta)) + 1
                store.put("counter", b"%d" % count, if_generation_match=meta.generation)
                won.append(count)
            except (PreconditionFailedError, NotFoundError):
                continue  # replaced since it was looked at, or read
    results.put((number, won))


def run(work: Any, uri: str) -> dict[int, list[int]]:
    """Run `work` in several processes at once and return what each has won."""
    barrier, results = processes.Barrier(NUM_PROCESSES), processes.SimpleQueue()
    started = [
        processes.Process(target=work, args=(uri, number, barrier, results), daemon=True)
        for number in range(NUM_PROCESSES)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(200)
        assert process.exitcode == 0
    return dict(results.get() for _ in started)


def test_one_of_many_creators_wins(tmp_path: Path) -> None:
    won = run(create, tmp_path.as_uri())
    assert sorted(at for each in won.values() for at in each) == list(range(NUM_ROUNDS))
    for number, rounds in won.items():
        for at in rounds:
            assert (tmp_path / f"d{at}/k").read_bytes() == f"{number}".encode()
    assert list(temporary_files(str(tmp_path))) == []


def test_no_update_is_lost(tmp_path: Path) -> None:
    (tmp_path / "counter").write_bytes(b"0")
    won = run(increment, tmp_path.as_uri())
    total = NUM_PROCESSES * NUM_ROUNDS
    assert sorted(count for each in won.values() for count in each) == list(range(1, total + 1))
    assert (tmp_path / "counter").read_bytes() == b"%d" % total
    assert list(temporary_files(str(tmp_path))) == []


async def test_conditions_hold_between_tasks(tmp_path: Path) -> None:
    """Where every other writer has none, too."""
    service = open_service(tmp_path.as_uri())
    first = await service.put(WriteRequest("a"), [b"0"], crc32c=None)
    last = first.generation
    for _ in range(30):
        expected = Precondition(if_generation_match=last)
        outcomes = await asyncio.gather(
            service.put(WriteRequest("a", expected), [b"1"], crc32c=None),
            service.put(WriteRequest("a", expected), [b"2"], crc32c=None),
            service.delete("a", generation=last),
            return_exceptions=True,
        )
        won = [each for each in outcomes if not isinstance(each, BaseException)]
        lost = {type(each) for each in outcomes if isinstance(each, BaseException)}
        assert len(won) == 1, outcomes
        assert lost <= {PreconditionFailedError, NotFoundError}
        meta = await service.put(WriteRequest("a"), [b"0"], crc32c=None)
        last = meta.generation


HOLD = """
import sys, time
from pathlib import Path
from aioflux._services.local.write import Stop
from aioflux._services.local.write import locked
with locked(Path(sys.argv[1]), Stop()):
    print("held", flush=True)
    time.sleep(3600)
"""


def python(script: str, argument: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(argument)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Have another process hold the lock of an object."""
    with python(HOLD, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            yield holder
        finally:
            holder.kill()


def test_the_lock_of_a_killed_writer_is_free(tmp_path: Path) -> None:
    """What is left of it is hidden, found by a clean-up and in nobody's way."""
    with holding(tmp_path / "a") as holder:
        asyncio.run(write_after(tmp_path, lambda: holder.send_signal(signal.SIGKILL)))
    assert list(temporary_files(str(tmp_path))) == []


async def write_after(directory: Path, release: Callable[[], None]) -> None:
    service = open_service(f"file://{directory}")
    create_only = Precondition(if_absent=True)
    writing = asyncio.create_task(service.put(WriteRequest("a", create_only), [b"1"], crc32c=None))
    assert await asyncio.wait([writing], timeout=0.2) == (set(), {writing})
    release()
    async with asyncio.timeout(100):
        await writing
    assert [meta.key for meta in (await service.list_page(ListRequest(""))).objects] == ["a"]


AWAIT = """
import asyncio, sys, aioflux
async def main():
    async with aioflux.open_store(sys.argv[1]) as store:
        print("waiting", flush=True)
        await store.put("a", b"1", mode="create")
asyncio.run(main())
"""

DEADLINE = """
import asyncio, sys, aioflux
async def main():
    retry = aioflux.RetryPolicy(deadline_seconds=0.5)
    async with aioflux.open_store(sys.argv[1], retry=retry) as store:
        print("waiting", flush=True)
        calls = store.put("a", b"1"), store.put("a", b"1", mode="create"), store.delete("a")
        errors = await asyncio.gather(*calls, return_exceptions=True)
        sys.exit(str([type(error).__name__ for error in errors]))
asyncio.run(main())
"""

BLOCK = """
import sys, aioflux.sync
with aioflux.sync.open_store(sys.argv[1]) as store:
    print("waiting", flush=True)
    store.put("a", b"1")
"""


@pytest.mark.parametrize(
    ("script", "sent", "said"),
    [
        pytest.param(DEADLINE, None, str(["TransientError"] * 3).encode(), id="deadline"),
        pytest.param(AWAIT, signal.SIGINT, b"KeyboardInterrupt", id="await"),
        pytest.param(BLOCK, signal.SIGINT, b"KeyboardInterrupt", id="block"),
    ],
)
def test_a_lock_that_stays_held_holds_no_process(
    tmp_path: Path, script: str, sent: int | None, said: bytes
) -> None:
    """Its deadline and Ctrl-C end a write, and the process ends with it."""
    (tmp_path / "a").write_bytes(b"0")
    with locked(tmp_path / "a", Stop()):
        before = sorted(os.listdir(tmp_path))
        with python(script, tmp_path.as_uri()) as waiting:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == b"waiting\n"
            if sent is not None:
                with pytest.raises(subprocess.TimeoutExpired):
                    waiting.wait(0.3)
                waiting.send_signal(sent)
            try:
                _, err = waiting.communicate(timeout=200)
            finally:
                waiting.kill()
        assert said in err
        assert sorted(os.listdir(tmp_path)) == before
        assert (tmp_path / "a").read_bytes() == b"0"


def test_a_link_or_rename_that_was_sent_twice_has_succeeded(tmp_path: Path) -> None:
    """NFS sends it again where an answer is lost, and the second answer is an error."""
    (tmp_path / f"{TEMPORARY}1").write_bytes(b"1")
    (tmp_path / "a").hardlink_to(tmp_path / f"{TEMPORARY}1")
    link_new(tmp_path / f"{TEMPORARY}1", tmp_path / "a")
    (tmp_path / f"{TEMPORARY}2").write_bytes(b"2")
    with pytest.raises(FileExistsError):
        link_new(tmp_path / f"{TEMPORARY}2", tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / f"{TEMPORARY}3", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_locks_do_not_pile_up(tmp_path: Path) -> None:
    for name in ("a", "a", "b" * 255):
        with locked(tmp_path / name, Stop()):
            assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


async def test_an_object_in_the_way_is_distinguished_from_a_condition(tmp_path: Path) -> None:
    service = open_service(tmp_path.as_uri())
    await service.put(WriteRequest("a"), [b"1"], crc32c=None)
    create_only = Precondition(if_absent=True)
    with pytest.raises(PreconditionFailedError, match="/a: it exists"):
        await service.put(WriteRequest("a", create_only), [b"2"], crc32c=None)
    with pytest.raises(StorageError, match="a part of its path is an object"):
        await service.put(WriteRequest("a/b", create_only), [b"2"], crc32c=None)
