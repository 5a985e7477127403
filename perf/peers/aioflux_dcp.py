"""aioflux: `StorageWriter` and `StorageReader` of `aioflux.checkpoint.dcp`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from perf.ranks import do, prepare

if TYPE_CHECKING:
    from perf.ranks import Task

__all__ = ["load_dcp", "prepare", "reader", "save_dcp", "writer"]


def writer(task: Task) -> StorageWriter:
    """Return the writer of a checkpoint."""
    return StorageWriter(task.uri, endpoint_url=task.url)


def reader(task: Task) -> StorageReader:
    """Return the reader of a checkpoint."""
    return StorageReader(task.uri, endpoint_url=task.url)


save_dcp = load_dcp = do
