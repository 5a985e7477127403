"""Real ranks with real workers: each object once per epoch, also with others after a kill."""

from __future__ import annotations

import json
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest

from tests.data import rank_task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.data.conftest import Bucket

pytest.importorskip("torchdata")

NUM_OBJECTS = 150
PROCESSES = multiprocessing.get_context("forkserver")


def run_ranks(bucket: Bucket, out: Path, *, world_size: int, **settings: Any) -> list[int | None]:
    """Run a job to its end and return how its ranks ended."""
    out.mkdir()
    given = {
        "uri": bucket.uri,
        "endpoint_url": bucket.server.url,
        "out": str(out),
        "meeting": str(out / "meeting"),
        "resume": [],
        "batch_size": 5,
        "kill_at_step": -1,
        "kill_in_epoch": -1,
        "world_size": world_size,
        **settings,
    }
    ranks = [
        PROCESSES.Process(target=rank_task.main, args=({**given, "rank": rank},))
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def keys_read(files: list[Path]) -> list[str]:
    return sorted(key for file in files for key in json.loads(file.read_text())["read"])


def test_each_object_is_read_once_per_epoch_also_after_a_kill(
    bucket: Bucket, tmp_path: Path
) -> None:
    """3 ranks x 2 workers read an epoch and are killed in the second; 2 x 3 go on for two."""
    keys = sorted(bucket.fill(NUM_OBJECTS))
    first, second = tmp_path / "first", tmp_path / "second"
    ended = run_ranks(
        bucket,
        first,
        world_size=3,
        num_workers=2,
        num_epochs=2,
        kill_at_step=4,
        kill_in_epoch=1,
    )
    assert ended == [-9] * 3
    assert keys_read([first / f"{rank}-0.json" for rank in range(3)]) == keys
    saved = [first / f"{rank}.json" for rank in range(3)]
    assert len(keys_read(saved)) == 3 * 4 * 5

    ended = run_ranks(
        bucket,
        second,
        world_size=2,
        num_workers=3,
        resume=[str(file) for file in saved],
        num_epochs=3,
    )
    assert ended == [0, 0]
    assert keys_read([*saved, *(second / f"{rank}-1.json" for rank in range(2))]) == keys
    assert keys_read([second / f"{rank}-2.json" for rank in range(2)]) == keys
