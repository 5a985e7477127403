"""aioflux.data: MapDataset and IterableDataset in DataLoader workers or threads, with defaults."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioflux.data import IterableDataset, MapDataset, loader
from perf.peers._loading import Datasets, decode, epoch
from perf.servers._tmpfs import memory_directory

if TYPE_CHECKING:
    from aioflux.data import Sample
    from perf.work import OperationResult, Work


class _Item:
    """Turns a sample into an item. A class, because a lambda cannot be pickled."""

    def __init__(self, work: Work) -> None:
        self._decode = decode(work)

    def __call__(self, sample: Sample) -> Any:
        return self._decode(sample.data)


def _options(work: Work) -> dict[str, Any]:
    return {"endpoint_url": work.url, "transform": _Item(work)}


def _uri(work: Work) -> str:
    return work.uri(work.prefix)


def _map(work: Work) -> MapDataset[Any]:
    return MapDataset(_uri(work), **_options(work))


def _stream(work: Work) -> IterableDataset[Any]:
    return IterableDataset(_uri(work), **_options(work))


def _threads(dataset: Any, work: Work) -> Any:
    return loader(dataset, batch_size=work.batch_size, num_threads=work.num_threads)


_MAPPED, _STREAMED = Datasets(_map), Datasets(_stream)
_THREADED = Datasets(_stream, _threads)
load = _MAPPED.epoch


async def stream(work: Work) -> OperationResult:
    """Read an epoch of an IterableDataset, in workers or threads."""
    return await (_THREADED if work.num_threads else _STREAMED).epoch(work)


# --- with a cache -------------------------------------------------------------------------------

_PREFIX = "aioflux-perf-cache-"
_SLACK = 2
"""Maximum size of the cache, as a multiple of the size of all objects."""
_cached: dict[Work, tuple[MapDataset[Any], Path]] = {}
"""Datasets and the directories of their caches."""


def _new_directory(num_bytes: int) -> Path:
    """Create a directory for a cache, and remove the directories of killed processes."""
    parent = memory_directory(num_bytes) or Path(tempfile.gettempdir())
    for old in parent.glob(f"{_PREFIX}*"):
        pid = old.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _prepare_cached(work: Work) -> None:
    num_bytes = _SLACK * work.size_bytes * work.num_objects
    directory = _new_directory(num_bytes)
    dataset = MapDataset(_uri(work), cache=str(directory), cache_bytes=num_bytes, **_options(work))
    if work.operation == "load_again":
        epoch(dataset, work)
    _cached[work] = dataset, directory


def _epoch_of_cached(work: Work) -> OperationResult:
    if work not in _cached:
        _prepare_cached(work)
    dataset, directory = _cached.pop(work)
    try:
        return epoch(dataset, work)
    finally:
        shutil.rmtree(directory)


async def load_first(work: Work) -> OperationResult:
    """Read an epoch of a MapDataset that fills its cache."""
    return _epoch_of_cached(work)


async def load_again(work: Work) -> OperationResult:
    """Read an epoch of a MapDataset from its cache."""
    return _epoch_of_cached(work)


def prepare(work: Work) -> None:
    """Build the dataset; for a second epoch, fill its cache."""
    if work.operation == "load":
        _MAPPED.prepare(work)
    elif work.operation == "stream":
        (_THREADED if work.num_threads else _STREAMED).prepare(work)
    else:
        _prepare_cached(work)
