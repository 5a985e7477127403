"""s3torchconnector: S3StorageWriter and S3StorageReader of its `dcp`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from s3torchconnector._s3client import S3Client  # type: ignore[import-not-found, import-untyped]
from s3torchconnector.dcp import (  # type: ignore[import-not-found, import-untyped]
    S3FileSystem,
    S3StorageReader,
    S3StorageWriter,
)

from perf import ranks
from perf.access import REGION
from perf.peers._s3torchconnector import client_config
from perf.ranks import prepare as prepare

if TYPE_CHECKING:
    from perf.ranks import Task
    from perf.work import OperationResult, Work


def _with_server(storage: Any, task: Task, **options: Any) -> Any:
    """Set the server's address in a writer or reader; its constructor has no argument for it."""
    client = S3Client(REGION, endpoint=task.url, s3client_config=client_config())
    storage.fs = S3FileSystem(REGION, s3_client=client, **options)
    storage.path = storage.fs.init_path(task.uri)
    return storage


def writer(task: Task) -> Any:
    """Return the writer of a checkpoint."""
    storage = S3StorageWriter(REGION, task.uri, s3client_config=client_config())
    return _with_server(storage, task)


def reader(task: Task) -> Any:
    """Return the reader of a checkpoint."""
    storage = S3StorageReader(REGION, task.uri, s3client_config=client_config())
    constructor = storage.fs._reader_constructor  # noqa: SLF001
    return _with_server(storage, task, reader_constructor=constructor)


async def save_dcp(work: Work) -> OperationResult:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> OperationResult:
    """Load a checkpoint into existing tensors, with the number of ranks that saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> OperationResult:
    """Load a checkpoint with one rank less."""
    return ranks.do(work)
