"""SIGKILL at random moments: what `latest` names always loads, and is a state that was saved.

`AIOFLUX_TEST_ROUNDS=100` kills so often in each way; once by default.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import bridge, open_store
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._orphans import clean_saves
from aioflux.checkpoint._steps import read_commit
from aioflux.testing import GCSServer
from tests.checkpoint.manager.desk import train
from tests.checkpoint.manager.trainer import is_state_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

NUM_ROUNDS = int(os.environ.get("AIOFLUX_TEST_ROUNDS", "1"))
STEPS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(scope="module")
def forks(server: GCSServer) -> Iterator[subprocess.Popen[str]]:
    trainer = train(server)
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    assert trainer.stdout.readline() == "ready\n"
    yield trainer
    trainer.stdin.close()
    trainer.stdout.close()
    trainer.kill()
    trainer.wait()


def train_and_kill(
    forks: subprocess.Popen[str], plan: dict[str, Any], seconds: float
) -> tuple[int, int]:
    """Train on all ranks, kill them so long after they began; return what all staged and had
    committed."""
    assert forks.stdin is not None
    assert forks.stdout is not None
    world_size = plan["world_size"]
    for rank in range(world_size):
        forks.stdin.write(json.dumps({**plan, "rank": rank}) + "\n")
    forks.stdin.flush()
    pids: set[int] = set()
    staged: Counter[int] = Counter()
    committed = 0

    def hear(line: str) -> None:
        nonlocal committed
        pid, what, *step = line.split()
        pids.add(int(pid)) if what == "ready" else None
        if what == "staged":
            staged[int(step[0])] += 1
        if what == "committed":
            committed = max(committed, int(step[0]))

    while len(pids) < world_size:
        hear(forks.stdout.readline())
    time.sleep(seconds)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # What they said before they died; then a word of our own.
    forks.stdin.write(json.dumps({"uri": plan["uri"], "steps": 0, "close": False}) + "\n")
    forks.stdin.flush()
    while int((line := forks.stdout.readline()).split()[0]) in pids:
        hear(line)
    return max((step for step, n in staged.items() if n == world_size), default=0), committed


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("staging", ["thread", "process"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_the_latest_step_always_loads(
    server: GCSServer,
    forks: subprocess.Popen[str],
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
            "meeting": f"file://{tmp_path}/{number}",
            "wait": draw.random() < 0.5,
            "options": {"staging": staging, "keep_last": 2, "commit_seconds": 5},
            **({"only_step": 1} if overwrite else {}),
        }
        staged, committed = train_and_kill(forks, plan, draw.uniform(0.05, 1.0))
        known = max(known, committed)
        with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
            if checkpointer.latest() is None:
                assert not known
            else:
                known = look(checkpointer, known)
            if staging == "process":
                # What all ranks had staged is committed, though they are gone.
                end = time.monotonic() + 60
                while known < staged:
                    assert time.monotonic() < end, f"{staged} was staged, {known} is there"
                    time.sleep(0.1)
                    if checkpointer.latest() is not None:
                        known = look(checkpointer, known)
    assert left_over(server, uri) == set()


def look(checkpointer: Checkpointer, known: int) -> int:
    """Load the latest step; return which state it holds, which is none before the last commit."""
    state = checkpointer.load()
    value = state["optimizer"]["step"]
    assert is_state_of(value, state)
    assert value >= known
    return int(value)


def left_over(server: GCSServer, uri: str) -> set[str]:
    """Return what neither a commit names nor `clean` finds."""

    async def find() -> set[str]:
        async with open_store(uri, endpoint_url=server.url) as store:
            later = datetime.now(UTC) + timedelta(days=1)
            await clean_saves(store, now=later, older_than_seconds=0)
            named: set[str] = set()
            keys = {meta.key async for meta in store.list("step-")}
            for key in keys:
                if key.endswith(".metadata"):
                    prefix = key.removesuffix(".metadata")
                    found = await read_commit(store, prefix)
                    assert found.commit is not None
                    named |= {key, *(prefix + each.key for each in found.commit.objects)}
            return keys - named

    return bridge.run(find())
