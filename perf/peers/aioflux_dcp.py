"""aioflux: `StorageWriter` and `StorageReader` of `aioflux.checkpoint.dcp`, at their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from perf import ranks
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import Told, Work


def writer(task: Task) -> StorageWriter:
    """Return what writes a checkpoint."""
    return StorageWriter(task.uri, endpoint_url=task.url)


def reader(task: Task) -> StorageReader:
    """Return what reads it."""
    return StorageReader(task.uri, endpoint_url=task.url)


def num_bytes_read(used: StorageReader) -> int:
    """Return how many bytes a reader has received."""
    return used.stats.bytes_received


async def save_dcp(work: Work) -> Told:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> Told:
    """Load it into memory that is there, by as many ranks as saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> Told:
    """Load it by one rank less."""
    return ranks.do(work)
