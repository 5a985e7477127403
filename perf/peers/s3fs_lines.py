"""fsspec over s3fs, as FSSpecFileLister and FSSpecFileOpener of torchdata used it: a file a shard.

torchdata has left its DataPipes behind: what these two did is written out, but for a buffer.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import s3fs  # type: ignore[import-not-found, import-untyped]
from torch.utils.data import IterableDataset, get_worker_info

from perf.peers._lines import Lines
from perf.work import lines_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.work import Work


class _Shards(IterableDataset[Any]):
    def __init__(self, work: Work) -> None:
        self._work = work

    def __iter__(self) -> Iterator[bytes]:
        work, worker = self._work, get_worker_info()
        # In the worker: its thread does not survive a fork.
        filesystem = s3fs.S3FileSystem(endpoint_url=work.url, skip_instance_cache=True)
        prefix = lines_prefix(work.size_bytes, work.num_objects)
        paths = sorted(filesystem.ls(f"{work.bucket}/{prefix}", detail=False))
        for path in paths if worker is None else paths[worker.id :: worker.num_workers]:
            # Its own lines copy a block of 50 MB each: one shard had not ended after 60 s.
            with io.BufferedReader(filesystem.open(path, mode="rb"), 1 << 20) as file:
                yield from (line.strip(b"\r\n") for line in file)


_LINES = Lines(_Shards)
prepare = _LINES.prepare


async def lines(work: Work) -> int:
    """Take the lines of shards through an epoch."""
    return _LINES.epoch(work)
