"""aioflux: `StorageWriter` and `StorageReader` of `aioflux.checkpoint.dcp`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from perf import ranks
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import OperationResult, Work


def writer(task: Task) -> StorageWriter:
    """Return the writer of a checkpoint."""
    return StorageWriter(task.uri, endpoint_url=task.url)


def reader(task: Task) -> StorageReader:
    """Return the reader of a checkpoint."""
    return StorageReader(task.uri, endpoint_url=task.url)


def num_bytes_read(used: StorageReader) -> int:
    """Return the number of bytes that a reader has received."""
    return used.stats.bytes_received


async def save_dcp(work: Work) -> OperationResult:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> OperationResult:
    """Load a checkpoint into existing tensors, with the number of ranks that saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> OperationResult:
    """Load a checkpoint with one rank less."""
    return ranks.do(work)
