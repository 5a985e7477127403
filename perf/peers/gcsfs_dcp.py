"""FsspecWriter and FsspecReader of torch.distributed.checkpoint, with gcsfs and its defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import _fsspec_filesystem

import perf.peers._gcsfs  # noqa: F401  sets the environment of gcsfs
from perf.ranks import do, prepare

if TYPE_CHECKING:
    from perf.ranks import Task


__all__ = ["load_dcp", "prepare", "reader", "save_dcp", "writer"]


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


save_dcp = load_dcp = do
