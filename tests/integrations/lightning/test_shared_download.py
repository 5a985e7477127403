"""Ranks of one host that load one checkpoint."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux import RetryPolicy
from aioflux.integrations.lightning import AiofluxCheckpointIO

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

URI = "gs://bucket/run/last.ckpt"
NUM_RANKS = 3
KEEP_TRYING = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: NUM_RANKS)
    return tmp_path


def load(retry: RetryPolicy | None = None, map_location: Any = "cpu") -> Any:
    return AiofluxCheckpointIO(retry=retry).load_checkpoint(URI, map_location)


def load_at_once(server: GCSServer, directory: Path) -> list[Any]:
    """Load on several ranks, of which the first waits until the others are at the lock.

    Threads act as ranks: a lock belongs to an open file, not to the process.
    """

    def num_opened() -> int:
        names = Path("/proc/self/fd").iterdir()
        opened = [os.path.realpath(name) for name in names]
        return sum(name.startswith(str(directory)) and "." not in name for name in opened)

    def rank(_: int) -> Any:
        try:
            return load(KEEP_TRYING)
        except aioflux.PermissionDeniedError as exc:
            return exc

    with ThreadPoolExecutor(NUM_RANKS) as ranks:
        with server.faults.inject("objects.get", status=503, body=b""):
            loading = [ranks.submit(rank, number) for number in range(NUM_RANKS)]
            while num_opened() < NUM_RANKS:
                time.sleep(0.01)
        return [each.result() for each in loading]


def test_one_download_serves_all(server: GCSServer, temporary: Path) -> None:
    weight = torch.arange(100_000.0)
    AiofluxCheckpointIO().save_checkpoint({"weight": weight}, URI)
    size = len(server.get("bucket", "run/last.ckpt"))
    server.stats.reset()
    loaded = load_at_once(server, temporary)
    assert size <= server.stats.total.bytes_out < 2 * size
    assert all(torch.equal(each["weight"], weight) for each in loaded)
    loaded[0]["weight"].zero_()
    assert torch.equal(loaded[1]["weight"], weight)
    assert not any(path.is_file() for path in temporary.rglob("*"))


def test_the_others_download_if_the_first_one_fails(server: GCSServer, temporary: Path) -> None:
    AiofluxCheckpointIO().save_checkpoint({"step": 7}, URI)
    server.faults.add("objects.media", status=403, times=1)
    loaded = load_at_once(server, temporary)
    assert loaded.count({"step": 7}) == NUM_RANKS - 1
    assert sum(isinstance(each, aioflux.PermissionDeniedError) for each in loaded) == 1


def test_the_path_of_a_killed_rank_is_checked(server: GCSServer, temporary: Path) -> None:
    """Another process may have its id now, with another file."""
    AiofluxCheckpointIO().save_checkpoint({"weight": torch.ones(9)}, URI)
    loaded: list[Any] = []

    def load_meanwhile(storage: Any, _: str) -> Any:
        if not loaded:
            loaded.append(None)
            (lock,) = (each for each in temporary.rglob("*") if len(each.name) == 64)
            record = json.loads(lock.read_text())
            with (temporary / "other").open("w+b") as other:
                other.truncate(record["size"])
                for path in (f"/proc/{os.getpid()}/fd/{other.fileno()}", "/proc/0/fd/0"):
                    lock.write_text(json.dumps({**record, "path": path}))
                    loaded.append(load())
        return storage

    loaded.append(load(map_location=load_meanwhile))
    assert [each["weight"].sum() for each in loaded[1:]] == [9, 9, 9]


def test_a_directory_that_others_can_write_is_not_used(server: GCSServer, temporary: Path) -> None:
    AiofluxCheckpointIO().save_checkpoint({"step": 7}, URI)
    directory = temporary / f"aioflux-{os.getuid()}"
    directory.mkdir()
    directory.chmod(0o777)
    assert load() == {"step": 7}
    assert list(directory.iterdir()) == []


def test_a_missing_checkpoint_is_an_error_and_leaves_no_file(
    server: GCSServer, temporary: Path
) -> None:
    with pytest.raises(aioflux.NotFoundError, match=r"last\.ckpt"):
        load()
    assert not any(path.is_file() for path in temporary.rglob("*"))
