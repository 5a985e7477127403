"""s3torchconnector: S3StorageWriter and S3StorageReader of its `dcp`, at their defaults."""

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
    from perf.work import Told, Work


def _at(made: Any, task: Task, **options: Any) -> Any:
    """Return it with the server's address, which its constructor does not take."""
    client = S3Client(REGION, endpoint=task.url, s3client_config=client_config())
    made.fs = S3FileSystem(REGION, s3_client=client, **options)
    made.path = made.fs.init_path(task.uri)
    return made


def writer(task: Task) -> Any:
    """Return what writes a checkpoint."""
    made = S3StorageWriter(REGION, task.uri, s3client_config=client_config())
    return _at(made, task)


def reader(task: Task) -> Any:
    """Return what reads it."""
    made = S3StorageReader(REGION, task.uri, s3client_config=client_config())
    return _at(made, task, reader_constructor=made.fs._reader_constructor)  # noqa: SLF001


async def save_dcp(work: Work) -> Told:
    """Save a state, and return the bytes of its tensors."""
    return ranks.do(work)


async def load_dcp(work: Work) -> Told:
    """Load it into memory that is there, by as many ranks as saved it."""
    return ranks.do(work)


async def reshard_dcp(work: Work) -> Told:
    """Load it by one rank less."""
    return ranks.do(work)
