"""SIGKILL at random moments: what `latest` names always loads, and is a state that was saved.

`AIOFLUX_TEST_ROUNDS=100` kills so often in each way; once by default.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from aioflux.checkpoint import Checkpointer, clean
from aioflux.testing import GCSServer
from tests.checkpoint.manager.trainer import is_state_of
from tests.checkpoint.manager.worker_process import is_alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.checkpoint.manager.worker_process import Forks

pytestmark = pytest.mark.more

NUM_ROUNDS = int(os.environ.get("AIOFLUX_TEST_ROUNDS", "1"))
STEPS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


class Killed(NamedTuple):
    """What trainers said before they were killed."""

    staged: int
    """The last step that all of them had staged."""
    committed: int
    """The last step that one of them knew to be committed."""
    uploaders: list[int]
    """The processes that go on without them."""


def train_and_kill(forks: Forks, server: GCSServer, plan: dict[str, Any], seconds: float) -> Killed:
    """Train on all ranks, and kill them so long after they began."""
    said, theirs = os.pipe()
    pids: list[int] = []
    with open(said) as lines, open(os.devnull) as nothing:
        try:
            for rank in range(plan["world_size"]):
                task = {**plan, "rank": rank}
                pids.append(forks.fork("train", server, task, fds=[nothing.fileno(), theirs]))
            os.close(theirs)
            words = [lines.readline().split() for _ in pids]
            # No rank is past its beginning before all are.
            while sum(what == "ready" for what, _ in words) < len(pids):
                words.append(lines.readline().split())
            time.sleep(seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                forks.call(pid)
        words += [line.split() for line in lines]
    numbers: dict[str, list[int]] = {"ready": [], "staged": [], "committed": []}
    for what, number in words:
        numbers[what].append(int(number))
    staged = Counter(numbers["staged"])
    return Killed(
        staged=max((step for step, n in staged.items() if n == len(pids)), default=0),
        committed=max(numbers["committed"], default=0),
        uploaders=[pid for pid in numbers["ready"] if pid],
    )


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("staging", ["thread", "process"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_the_latest_step_always_loads(
    forks: Forks,
    server: GCSServer,
    tmp_path: Path,
    world_size: int,
    staging: str,
    overwrite: bool,
) -> None:
    uri = f"gs://bucket/{staging}-{world_size}-{overwrite}"
    draw = random.Random(f"{uri} {NUM_ROUNDS}")
    known = 0
    for number in range(NUM_ROUNDS):
        plan = {
            "uri": uri,
            "steps": STEPS,
            "first": 1 + number * STEPS,
            "world_size": world_size,
            "rendezvous": f"file://{tmp_path}/{number}",
            "wait": draw.random() < 0.5,
            "close": True,
            "options": {"staging": staging, "keep_last": 2},
            **({"only_step": 1} if overwrite else {}),
        }
        killed = train_and_kill(forks, server, plan, draw.uniform(0.05, 1.0))
        known = max(known, killed.committed)
        with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
            known = look(checkpointer, known)
            # What all ranks had staged is committed, though they are gone.
            end = time.monotonic() + 240
            while staging == "process" and known < killed.staged:
                assert time.monotonic() < end, f"{killed.staged} was staged, {known} is there"
                time.sleep(0.1)
                known = look(checkpointer, known)
            for pid in killed.uploaders:
                with suppress(ProcessLookupError):  # one that has nothing to do ends by itself
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda pids=killed.uploaders: not any(map(is_alive, pids)))
            known = look(checkpointer, known)
        # What they sent last has come, too.
        wait_until(lambda: not server.stats.connections_open)
    assert left_over(server, uri) == set()


def look(checkpointer: Checkpointer, known: int) -> int:
    """Load the latest step; return which state it holds, which is none before the last commit."""
    if checkpointer.latest() is None:
        assert not known
        return known
    state = checkpointer.load()
    value = state["optimizer"]["step"]
    assert is_state_of(value, state)
    assert value >= known
    return int(value)


def left_over(server: GCSServer, uri: str) -> set[str]:
    """Return what neither a commit names nor `clean` finds."""
    clean(uri, older_than_seconds=0, endpoint_url=server.url)
    prefix = uri.removeprefix("gs://bucket/") + "/step-"
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        named: set[str] = set()
        for step in checkpointer.steps():
            found = checkpointer.verify(step).found
            assert found is not None
            assert found.commit is not None
            keys = (".metadata", *(each.key for each in found.commit.objects))
            named |= {f"{prefix}{step:08d}/{key}" for key in keys}
    return {*server.keys("bucket", prefix)} - named
