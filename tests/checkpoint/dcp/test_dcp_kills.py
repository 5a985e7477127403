"""An overwrite that is killed leaves the checkpoint before it, or has replaced it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from aioflux._checksums import crc32c
from aioflux.checkpoint._commit import decode_commit
from tests.checkpoint.dcp.kill_task import state_of
from tests.checkpoint.dcp.states import assert_equal, copy_down, stock_load

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer

URI = "gs://bucket/c"
NUM_KILLS = 12


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
    """Each save runs until it is killed; the moments spread over its whole length."""
    rng = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.dcp.kill_task", URI],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forker:
        assert forker.stdin is not None
        assert forker.stdout is not None

        def tell(line: str) -> None:
            assert forker.stdin is not None
            forker.stdin.write(f"{line}\n")
            forker.stdin.flush()

        for _ in range(2):  # the first one is slower
            begun = time.perf_counter()
            tell("1\nwait")
            assert int(forker.stdout.readline()) == 0
        length_seconds = time.perf_counter() - begun
        last, codes = 1, []
        for seed in range(2, 2 + NUM_KILLS):
            tell(str(seed))
            time.sleep(rng.uniform(0, 1.2 * length_seconds))
            tell("kill")
            codes.append(int(forker.stdout.readline()))
            folder = copy_down(server, "c", tmp_path / str(seed))
            loaded = stock_load(folder, state_of(0))
            last = found_in(folder, loaded, {last, seed})
        forker.stdin.close()
        assert forker.wait(60) == 0
    assert -signal.SIGKILL in codes
