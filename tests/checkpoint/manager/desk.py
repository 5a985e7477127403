"""Processes of tests, and what they are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

ROOT = Path(__file__).parents[3]


class Rank:
    """One process of `rank_task`."""

    def __init__(self, server: GCSServer, rank: int, world_size: int, meeting: str) -> None:
        settings = {"rank": rank, "world_size": world_size, "meeting": meeting}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.manager.rank_task", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "STORAGE_EMULATOR_HOST": server.url},
        )

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, name: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, name: str, **arguments: Any) -> Any:
        self.tell(name, **arguments)
        told = self.hear()
        assert told[0], told
        return told[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


class Ranks:
    """Processes that save together."""

    def __init__(self, server: GCSServer, world_size: int, folder: Path) -> None:
        meeting = f"file://{folder}/meeting"
        self.all = [Rank(server, rank, world_size, meeting) for rank in range(world_size)]
        for each in self.all:
            each.await_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.all:
            each.end()

    def tell(self, name: str, **arguments: Any) -> list[Any]:
        """Tell all the same, and return what became of it on each."""
        for each in self.all:
            each.tell(name, **arguments)
        return [each.hear() for each in self.all]

    def ask(self, name: str, **arguments: Any) -> list[Any]:
        """Tell all the same, which goes well on each, and return what they have."""
        told = self.tell(name, **arguments)
        assert all(each[0] for each in told), told
        return [each[1] for each in told]


def train(server: GCSServer, *plan: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a `trainer`: of one plan, or one that forks."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.manager.trainer", *map(json.dumps, plan)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "STORAGE_EMULATOR_HOST": server.url},
    )


def wait_until(is_so: Any, seconds: float = 120) -> None:
    """Wait for what another process does."""
    import time

    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process that is not our child runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
