"""aioflux: lines of shards through the names of the S3 IO DataPipes, at their defaults."""

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


_LINES = Lines(_pipe)
prepare = _LINES.prepare


async def lines(work: Work) -> int:
    """Take the lines of shards through an epoch."""
    return _LINES.epoch(work)
