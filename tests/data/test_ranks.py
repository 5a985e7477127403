"""Real ranks with real workers: each object once per epoch, also with others after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.data.conftest import Bucket

pytest.importorskip("torchdata")

NUM_OBJECTS = 1000


def run_ranks(bucket: Bucket, out: Path, *, world_size: int, **settings: Any) -> list[int]:
    """Run a job to its end and return how its ranks ended."""
    out.mkdir()
    given = {
        "uri": bucket.uri,
        "endpoint_url": bucket.server.url,
        "out": str(out),
        "meeting": str(out / "meeting"),
        "resume": [],
        "batch_size": 10,
        "kill_at_step": -1,
        "kill_in_epoch": -1,
        **settings,
    }
    command = [sys.executable, "-m", "tests.data.rank_task"]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps({**given, "rank": rank, "world_size": world_size})],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    try:
        return [rank.wait(140) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def keys_read(files: list[Path]) -> list[str]:
    return sorted(key for file in files for key in json.loads(file.read_text())["read"])


@pytest.mark.timeout(300)  # 26 processes, which take a busy machine of two cores a minute
def test_each_object_is_read_once_per_epoch_also_after_a_kill(
    bucket: Bucket, tmp_path: Path
) -> None:
    """4 ranks x 3 workers read two epochs and are killed in the third; 2 x 4 go on for two."""
    keys = sorted(bucket.fill(NUM_OBJECTS))
    first, second = tmp_path / "first", tmp_path / "second"
    ended = run_ranks(
        bucket,
        first,
        world_size=4,
        num_workers=3,
        num_epochs=3,
        kill_at_step=11,
        kill_in_epoch=2,
    )
    assert ended == [-9] * 4
    for epoch in (0, 1):
        assert keys_read([first / f"{rank}-{epoch}.json" for rank in range(4)]) == keys
    saved = [first / f"{rank}.json" for rank in range(4)]
    assert len(keys_read(saved)) == 4 * 11 * 10

    ended = run_ranks(
        bucket,
        second,
        world_size=2,
        num_workers=4,
        resume=[str(file) for file in saved],
        num_epochs=5,
    )
    assert ended == [0, 0]
    assert keys_read([*saved, *(second / f"{rank}-2.json" for rank in range(2))]) == keys
    for epoch in (3, 4):
        assert keys_read([second / f"{rank}-{epoch}.json" for rank in range(2)]) == keys
