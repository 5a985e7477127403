"""An overwrite that is killed leaves the checkpoint before it, or has replaced it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.commit import decode_commit
from aioflux.testing.gcs_server import Hook
from tests.checkpoint.dcp.kill_task import state_of
from tests.checkpoint.dcp.states import assert_equal, copy_down, stock_load
from tests.patience import PATIENCE_SECONDS, wait_until_idle

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Request, Response

pytestmark = pytest.mark.more

URI = "gs://bucket/c"
NUM_KILLS = 9


class Halt(Hook):
    """Stops the server when it has done so many requests, and answered all but the last."""

    def __init__(self) -> None:
        self.num_before = 0
        self.is_reached = threading.Event()
        self._may_go_on = threading.Event()

    def after(self, request: Request, response: Response) -> Response:
        self.num_before -= 1
        if self.num_before == 0:
            may_go_on = self._may_go_on
            self.is_reached.set()
            assert may_go_on.wait(PATIENCE_SECONDS)
        return response

    def go_on(self) -> None:
        self.is_reached.clear()
        self._may_go_on.set()
        self._may_go_on = threading.Event()


def found_in(folder: Path, loaded: dict[str, Any], possible: set[int]) -> int:
    """Return the seed of the state that was loaded, which is whole and one of those."""
    seed = int(loaded["0"][0, 0]) // 10
    assert seed in possible
    assert_equal(loaded, state_of(seed))
    _, commit = decode_commit((folder / ".metadata").read_bytes(), uri="")
    assert commit is not None
    for each in commit.objects:
        assert crc32c((folder / each.key).read_bytes()) == each.crc32c
    return seed


def test_a_killed_overwrite_leaves_a_whole_checkpoint(server: GCSServer, tmp_path: Path) -> None:
    """Each is killed when an answer is due; these spread over all that a save asks for."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.dcp.kill_task", URI],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forker:
        assert forker.stdin is not None
        assert forker.stdout is not None

        def begin(seed: int) -> int:
            assert forker.stdin is not None
            forker.stdin.write(f"{seed}\n")
            forker.stdin.flush()
            return read()

        def read() -> int:
            assert forker.stdout is not None
            return int(forker.stdout.readline())

        for _ in range(2):  # the second one replaces, as all others do
            server.stats.reset()
            begin(1)
            assert read() == 0
        num_requests = server.stats.total.requests
        assert num_requests > NUM_KILLS
        halt, last = Halt(), 1
        server.app.hooks += (halt,)
        for number in range(NUM_KILLS):
            seed = 2 + number
            halt.num_before = 1 + number * num_requests // NUM_KILLS
            pid = begin(seed)
            assert halt.is_reached.wait(PATIENCE_SECONDS)
            os.kill(pid, signal.SIGKILL)
            assert read() == -signal.SIGKILL
            halt.go_on()
            wait_until_idle(server)
            folder = copy_down(server, "c", tmp_path / str(seed))
            loaded = stock_load(folder, state_of(0))
            last = found_in(folder, loaded, {last, seed})
            shutil.rmtree(folder)
        forker.stdin.close()
        assert forker.wait() == 0
