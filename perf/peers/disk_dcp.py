"""FileSystemWriter and FileSystemReader of torch.distributed.checkpoint, on a local disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from perf import ranks
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import Told, Work


def writer(task: Task) -> FileSystemWriter:
    """Return what writes a checkpoint."""
    return FileSystemWriter(f"{task.directory}/{task.prefix}")


def reader(task: Task) -> FileSystemReader:
    """Return what reads it; the kernel still has it in memory."""
    return FileSystemReader(f"{task.directory}/{task.prefix}")


async def save_dcp(work: Work) -> Told:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> Told:
    """Load it into memory that is there, by as many ranks as saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> Told:
    """Load it by one rank less."""
    return ranks.do(work)
