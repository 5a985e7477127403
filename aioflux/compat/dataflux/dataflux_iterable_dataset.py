"""DataFluxIterableDataset: the iterable-style dataset of gcs-torch-dataflux, over aioflux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from aioflux.compat.dataflux._bucket_dataset import BucketDataset, data_format_default
from aioflux.compat.dataflux._retry import DEFAULT_POLICY, modified_retry

__all__ = ["Config", "DataFluxIterableDataset", "data_format_default"]


def __getattr__(name: str) -> Any:
    """Build `MODIFIED_RETRY` on access: it needs google-cloud-storage."""
    if name == "MODIFIED_RETRY":
        return modified_retry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class Config:
    """Options of a `DataFluxIterableDataset`, with the names and defaults of the old class.

    `DataFluxIterableDataset` also accepts a `dataflux_mapstyle_dataset.Config`.
    """

    sort_listing_results: bool = False
    """Without effect: listings are always sorted."""
    max_composite_object_size: int = 100_000_000
    """Without effect: objects are read directly, and nothing is written to the bucket."""
    num_processes: int | None = field(default_factory=os.cpu_count)
    """Without effect: one process of aioflux lists faster than many of the old library."""
    prefix: str | None = None
    """Prefix of the names of the objects; None for all objects of the bucket."""
    max_listing_retries: int = 3
    """Maximum number of tries of the whole listing. Each try retries its requests, too."""
    disable_compose: bool = False
    """Sets `max_composite_object_size` to 0; without another effect."""
    list_retry_config: Any = DEFAULT_POLICY
    """Retry policy for the listing; the old class ignored this option."""
    download_retry_config: Any = DEFAULT_POLICY
    """Retry policy for downloads."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0


class DataFluxIterableDataset(BucketDataset, IterableDataset[Any]):
    """The objects of a bucket as a stream; each item is the result of `data_format_fn`.

    Has the differences from the old library that `DataFluxMapStyleDataset` lists, and these:

    * Objects are prefetched in order, across batches.
    * The shares of workers differ by at most one object.
    * Ctrl-C calls the signal handler of the program. The old class replaced this handler by one
      that exited with status 0.

    As in the old class, each DataLoader worker reads consecutive objects, and **every rank reads
    all objects**. To share them, set `dataset.objects = dataset.objects[rank::world_size]`, or use
    `aioflux.data.IterableDataset`, which shares objects among ranks.
    """

    _default_config = Config

    def __iter__(self) -> Iterator[Any]:
        """Read the share of this worker, or all objects if there are no workers.

        Raises:
            StorageError: An object cannot be read; the error names the object.
        """
        worker = get_worker_info()
        share = range(self._num_objects)
        if worker is not None:
            share = share_of_worker(len(share), worker_id=worker.id, num_workers=worker.num_workers)
        return self._items(share)


def share_of_worker(num_objects: int, *, worker_id: int, num_workers: int) -> range:
    """Return the consecutive indices of one worker; shares differ by at most one index."""
    start, end = (num_objects * number // num_workers for number in (worker_id, worker_id + 1))
    return range(start, end)
