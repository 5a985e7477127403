"""FsspecWriter and FsspecReader of torch.distributed.checkpoint, on gcsfs at its defaults."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import _fsspec_filesystem

from perf import ranks
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import Told, Work

# Read at import: otherwise gcsfs asks for the kind of a bucket over gRPC, which waits for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


def _options(task: Task) -> dict[str, Any]:
    return {"token": "anon", "endpoint_url": task.url, "skip_instance_cache": True}


def writer(task: Task) -> Any:
    """Return what writes a checkpoint."""
    # It would call sync() for the whole machine, since objects have no descriptor.
    return _fsspec_filesystem.FsspecWriter(
        f"gs://{task.bucket}/{task.prefix}", sync_files=False, **_options(task)
    )


def reader(task: Task) -> Any:
    """Return what reads it."""
    return _fsspec_filesystem.FsspecReader(f"gs://{task.bucket}/{task.prefix}", **_options(task))


async def save_dcp(work: Work) -> Told:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> Told:
    """Load it into memory that is there, by as many ranks as saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> Told:
    """Load it by one rank less."""
    return ranks.do(work)
