"""aioflux.data: MapDataset and IterableDataset in DataLoader workers, everything at its default."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioflux.data import IterableDataset, MapDataset
from perf.peers._loading import Datasets, decode, epoch
from perf.servers._room import place

if TYPE_CHECKING:
    from aioflux.data import Sample
    from perf.work import Work


class _Item:
    """Makes an item of a sample; it is no lambda, so that it pickles."""

    def __init__(self, work: Work) -> None:
        self._decode = decode(work)

    def __call__(self, sample: Sample) -> Any:
        return self._decode(sample.data)


def _options(work: Work) -> dict[str, Any]:
    """Return what differs from the defaults."""
    options: dict[str, Any] = {"endpoint_url": work.url, "transform": _Item(work)}
    if work.compose:
        options["compose"] = work.compose
    return options


def _uri(work: Work) -> str:
    return work.uri(work.prefix)


def _map(work: Work) -> MapDataset[Any]:
    return MapDataset(_uri(work), **_options(work))


def _stream(work: Work) -> IterableDataset[Any]:
    return IterableDataset(_uri(work), **_options(work))


_DATASETS: dict[str, Datasets] = {"load": Datasets(_map), "stream": Datasets(_stream)}


async def load(work: Work) -> tuple[int, float]:
    """Take a MapDataset through an epoch."""
    return _DATASETS["load"].epoch(work)


async def stream(work: Work) -> tuple[int, float]:
    """Take an IterableDataset through an epoch."""
    return _DATASETS["stream"].epoch(work)


# --- with a cache -------------------------------------------------------------------------------

_PREFIX = "aioflux-perf-cache-"
_SLACK = 2
"""Times the objects' size that the cache may take."""
_cached: dict[Work, tuple[MapDataset[Any], Path]] = {}
"""Datasets, each with the directory of its cache."""


def _new_directory(num_bytes: int) -> Path:
    """Make a directory for a cache, and remove those of processes that were killed."""
    parent = place(num_bytes) or Path(tempfile.gettempdir())
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


def _epoch_of_cached(work: Work) -> tuple[int, float]:
    if work not in _cached:
        _prepare_cached(work)
    dataset, directory = _cached.pop(work)
    try:
        return epoch(dataset, work)
    finally:
        shutil.rmtree(directory)


async def load_first(work: Work) -> tuple[int, float]:
    """Take a MapDataset through an epoch that fills its cache."""
    return _epoch_of_cached(work)


async def load_again(work: Work) -> tuple[int, float]:
    """Take a MapDataset through an epoch that finds everything in its cache."""
    return _epoch_of_cached(work)


def prepare(work: Work) -> None:
    """List what is loaded, and fill the cache for a second epoch."""
    if work.operation in _DATASETS:
        _DATASETS[work.operation].prepare(work)
    else:
        _prepare_cached(work)
