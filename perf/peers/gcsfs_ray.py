"""Ray's own ways over gcsfs: `read_binary_files`, `write_parquet`, and `ray.train.report`."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf.peers._gcsfs import open_filesystem
from perf.peers._ray import NUM_CPUS, blocks, finish, read, write  # before the import of Ray
from perf.peers._ray_train import run, train_and_save

import ray.data  # isort: skip
import ray.train
import torch
from pyarrow.fs import FSSpecHandler, PyFileSystem  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from perf.work import Moved, Work

__all__ = ["finish", "read_ray", "train_ray", "write_ray"]


def _dataset(work: Work) -> ray.data.Dataset:
    return ray.data.read_binary_files(
        f"{work.bucket}/{work.prefix}",
        filesystem=open_filesystem(work),
        override_num_blocks=2 * NUM_CPUS,  # its default, 200 blocks, is slower
    )


async def read_ray(work: Work) -> Moved:
    """List the objects and read them."""
    return read(_dataset, work)


def _write(work: Work) -> int:
    path, filesystem = f"{work.bucket}/out-{uuid.uuid4().hex}", open_filesystem(work)
    blocks(work).write_parquet(path, filesystem=filesystem)
    is_whole = filesystem.du(path) >= work.num_objects * work.size_bytes
    return work.num_objects * work.size_bytes if is_whole else 0


async def write_ray(work: Work) -> Moved:
    """Write the blocks as Parquet."""
    return write(_write, work)


def _save(number: int, state: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory, "state.pt"))
        checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": number}, checkpoint=checkpoint)


def _loop(config: dict[str, Any]) -> dict[str, float]:
    return train_and_save(_save, config)


async def train_ray(work: Work) -> Moved:
    """Train with `ray.train.report` in its default mode, which uploads a local directory."""
    return run(_loop, PyFileSystem(FSSpecHandler(open_filesystem(work))), work)
