"""fsspec over s3fs, used like FSSpecFileLister and FSSpecFileOpener of torchdata: a file per shard.

torchdata has removed its DataPipes, so this module repeats their code, with an additional buffer.
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
        # Opened in the worker, because a fork does not copy the thread of s3fs.
        filesystem = s3fs.S3FileSystem(endpoint_url=work.url, skip_instance_cache=True)
        prefix = lines_prefix(work.size_bytes, work.num_objects)
        paths = sorted(filesystem.ls(f"{work.bucket}/{prefix}", detail=False))
        for path in paths if worker is None else paths[worker.id :: worker.num_workers]:
            # Without the buffer, s3fs copies a block of 50 MB for each line: over 60 s for a shard.
            with io.BufferedReader(filesystem.open(path, mode="rb"), 1 << 20) as file:
                yield from (line.strip(b"\r\n") for line in file)


_LINES = Lines(_Shards)
prepare = _LINES.prepare


async def lines(work: Work) -> int:
    """Read an epoch of lines."""
    return _LINES.epoch(work)
