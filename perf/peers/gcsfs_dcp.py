"""FsspecWriter and FsspecReader of torch.distributed.checkpoint, with gcsfs and its defaults."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import _fsspec_filesystem

from perf import ranks
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import OperationResult, Work

# Read when gcsfs is imported. Without it, gcsfs requests the bucket type over gRPC, for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


def _options(task: Task) -> dict[str, Any]:
    return {"token": "anon", "endpoint_url": task.url, "skip_instance_cache": True}


def writer(task: Task) -> Any:
    """Return the writer of a checkpoint."""
    # `sync_files` would call sync() for the whole machine, because objects have no descriptor.
    return _fsspec_filesystem.FsspecWriter(
        f"gs://{task.bucket}/{task.prefix}", sync_files=False, **_options(task)
    )


def reader(task: Task) -> Any:
    """Return the reader of a checkpoint."""
    return _fsspec_filesystem.FsspecReader(f"gs://{task.bucket}/{task.prefix}", **_options(task))


async def save_dcp(work: Work) -> OperationResult:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> OperationResult:
    """Load a checkpoint into existing tensors, with the number of ranks that saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> OperationResult:
    """Load a checkpoint with one rank less."""
    return ranks.do(work)
