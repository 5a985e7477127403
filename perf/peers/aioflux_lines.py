"""aioflux: text lines through the interface of the S3 IO DataPipes, with defaults.

In `lines`, the pipe makes the batches, by torch's own `.batch()`. In `lines_loader`, DataLoader
makes the batches; it takes 5 us for each item of a DataPipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.compat.s3_datapipes import IterableWrapper
from perf.peers._lines import Lines
from perf.work import lines_prefix

if TYPE_CHECKING:
    from perf.work import Work


def _pipe(work: Work) -> Any:
    prefix = work.uri(lines_prefix(work.size_bytes, work.num_objects))
    urls = IterableWrapper([prefix]).list_files_by_s3(endpoint_url=work.url)
    shards = urls.sharding_filter().load_files_by_s3(endpoint_url=work.url)
    return shards.readlines(return_path=False)


def _batches(work: Work) -> Any:
    return _pipe(work).batch(work.batch_size)


_LINES = {"lines": Lines(_batches, has_batches=True), "lines_loader": Lines(_pipe)}


def prepare(work: Work) -> None:
    """Build the pipe."""
    _LINES[work.operation].prepare(work)


async def lines(work: Work) -> int:
    """Read an epoch of lines, in batches that the pipe makes."""
    return _LINES["lines"].epoch(work)


async def lines_loader(work: Work) -> int:
    """Read an epoch of lines, in batches that DataLoader makes."""
    return _LINES["lines_loader"].epoch(work)
