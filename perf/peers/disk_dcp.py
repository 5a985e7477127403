"""FileSystemWriter and FileSystemReader of torch.distributed.checkpoint, on a local disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from perf import ranks
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import OperationResult, Work


def writer(task: Task) -> FileSystemWriter:
    """Return the writer of a checkpoint."""
    return FileSystemWriter(f"{task.directory}/{task.prefix}")


def reader(task: Task) -> FileSystemReader:
    """Return the reader of the checkpoint, which is still in the kernel's page cache."""
    return FileSystemReader(f"{task.directory}/{task.prefix}")


async def save_dcp(work: Work) -> OperationResult:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> OperationResult:
    """Load a checkpoint into existing tensors, with the number of ranks that saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> OperationResult:
    """Load a checkpoint with one rank less."""
    return ranks.do(work)
