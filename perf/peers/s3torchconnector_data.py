"""s3torchconnector: map-style and iterable datasets with defaults, sharded by workers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from s3torchconnector import S3IterableDataset, S3MapDataset  # type: ignore[import-not-found, import-untyped]
from torch.utils.data import IterableDataset

from perf.peers._lines import Lines
from perf.peers._loading import Datasets, Records, decode
from perf.peers._s3torchconnector import options
from perf.work import lines_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.work import Moved, Work


class _Item:
    """Turns a reader into an item. A class, because a lambda cannot be pickled."""

    def __init__(self, work: Work) -> None:
        self._decode = decode(work)

    def __call__(self, reader: Any) -> Any:
        return self._decode(reader.read())


def _map(work: Work) -> Any:
    if work.record_bytes:
        prefix = work.uri(work.prefix)
        files = S3IterableDataset.from_prefix(prefix, enable_sharding=True, **options(work))
        return Records(files, work)
    found = S3MapDataset.from_prefix(work.uri(work.prefix), transform=_Item(work), **options(work))
    len(found)  # lists, as those of others are when they are built
    return found


def _stream(work: Work) -> Any:
    return S3IterableDataset.from_prefix(
        work.uri(work.prefix), transform=_Item(work), enable_sharding=True, **options(work)
    )


class _Shards(IterableDataset[Any]):
    """Lines of the shards of a worker; each shard is read into memory as a whole."""

    def __init__(self, work: Work) -> None:
        prefix = work.uri(lines_prefix(work.size_bytes, work.num_objects))
        self._shards = S3IterableDataset.from_prefix(prefix, enable_sharding=True, **options(work))

    def __iter__(self) -> Iterator[bytes]:
        # The reader has no `readline` of its own; the inherited one reads one byte at a time.
        for reader in self._shards:
            yield from (line.strip(b"\r\n") for line in io.BytesIO(reader.read()))


_DATASETS = {"load": Datasets(_map), "stream": Datasets(_stream)}
_LINES = Lines(_Shards)


def prepare(work: Work) -> None:
    """Build the dataset."""
    if work.operation == "lines":
        _LINES.prepare(work)
    else:
        _DATASETS[work.operation].prepare(work)


async def load(work: Work) -> Moved:
    """Read an epoch of a map-style dataset; records come from an iterable dataset."""
    return _DATASETS["load"].epoch(work)


async def stream(work: Work) -> Moved:
    """Read an epoch of an iterable dataset."""
    return _DATASETS["stream"].epoch(work)


async def lines(work: Work) -> int:
    """Read an epoch of lines."""
    return _LINES.epoch(work)
