"""gcs-torch-dataflux: its datasets in DataLoader workers, and its listing.

All options have their defaults, except `threads_per_process` of the map-style dataset in some
matches.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from perf.peers._loading import Datasets, Records, decode

try:
    from dataflux_core import fast_list  # type: ignore[import-not-found]
    from dataflux_pytorch import (  # type: ignore[import-not-found]
        dataflux_iterable_dataset,
        dataflux_mapstyle_dataset,
    )
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        f"{exc.name} is missing (pip install -e '.[perf-loading]')", name=exc.name
    ) from exc

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Moved, Work

_PROJECT = "perf"


def _point_at(work: Work) -> None:
    """Make the library's clients in all processes use the server, without credentials."""
    os.environ["STORAGE_EMULATOR_HOST"] = work.url


def _map(work: Work) -> Any:
    _point_at(work)
    if work.record_bytes:
        return Records(_stream(work, io.BytesIO), work)
    threads = {"threads_per_process": work.num_threads} if work.num_threads else {}
    config = dataflux_mapstyle_dataset.Config(prefix=work.prefix, **threads)
    return dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        _PROJECT, work.bucket, config, decode(work)
    )


def _stream(work: Work, item: Callable[[bytes], Any] | None = None) -> Any:
    _point_at(work)
    config = dataflux_iterable_dataset.Config(prefix=work.prefix)
    return dataflux_iterable_dataset.DataFluxIterableDataset(
        _PROJECT, work.bucket, config, item or decode(work)
    )


_DATASETS: dict[str, Datasets] = {"load": Datasets(_map), "stream": Datasets(_stream)}


def prepare(work: Work) -> None:
    """Build the dataset."""
    if work.operation in _DATASETS:
        _DATASETS[work.operation].prepare(work)


async def load(work: Work) -> Moved:
    """Read an epoch of its map-style dataset; records come from its iterable dataset."""
    return _DATASETS["load"].epoch(work)


async def stream(work: Work) -> Moved:
    """Read an epoch of its iterable dataset."""
    return _DATASETS["stream"].epoch(work)


async def list_all(work: Work) -> int:
    """List a set with a process for each CPU, and return the bytes of its objects."""
    _point_at(work)
    lister = fast_list.ListingController(
        max_parallelism=os.cpu_count(),
        project=_PROJECT,
        bucket=work.bucket,
        prefix=work.prefix,
    )
    return sum(size for _, size in lister.run())
