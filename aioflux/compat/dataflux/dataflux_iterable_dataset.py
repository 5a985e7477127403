"""DataFluxIterableDataset: the iterable-style dataset of gcs-torch-dataflux over aioflux."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from aioflux.compat.dataflux._bucket_dataset import BucketDataset, data_format_default
from aioflux.compat.dataflux._retry import DEFAULT_POLICY, modified_retry

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["Config", "DataFluxIterableDataset", "data_format_default"]


def __getattr__(name: str) -> Any:
    """Build `MODIFIED_RETRY` on access: it needs google-cloud-storage."""
    if name == "MODIFIED_RETRY":
        return modified_retry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class Config:
    """Options of a `DataFluxIterableDataset`, with the names and defaults of the old class.

    See `dataflux_mapstyle_dataset.Config`, which is accepted, too.
    """

    sort_listing_results: bool = False
    """Without effect: listings are always sorted."""
    max_composite_object_size: int = 100_000_000
    """Bytes of a composite, at most, 100 MB by default; 0 makes none."""
    num_processes: int | None = field(default_factory=os.cpu_count)
    """Without effect: one process lists faster than many did."""
    prefix: str | None = None
    """Beginning of the names of the objects; all objects of the bucket by default."""
    max_listing_retries: int = 3
    """Attempts to list, at most, if the service or the network fails for long."""
    disable_compose: bool = False
    """Sets `max_composite_object_size` to 0."""
    list_retry_config: Any = DEFAULT_POLICY
    """Retry policy of the listing; the old class ignored it."""
    download_retry_config: Any = DEFAULT_POLICY
    """The same for downloads."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0


class DataFluxIterableDataset(BucketDataset, IterableDataset[Any]):
    """The objects of a bucket as a stream of items that `data_format_fn` makes of their bytes.

    It differs from the old class as `DataFluxMapStyleDataset` does, and in this: objects are
    prefetched, in order, across batches; the shares of workers differ by one object at most; an
    iteration that ends early leaves no composites; Ctrl-C calls the handler of the program, which
    the old class replaced by one that exited with status 0.

    As in the old class, each DataLoader worker reads consecutive objects, and **every rank reads
    all of them**: give each its share by `dataset.objects = dataset.objects[rank::world_size]`, or
    use `aioflux.data.IterableDataset`, which shares them among ranks by itself.
    """

    _default_config = Config

    def __iter__(self) -> Iterator[Any]:
        """Read the share of this worker, or all objects if there are no workers.

        Raises:
            StorageError: The first object that cannot be read, named.
        """
        worker = get_worker_info()
        share = range(self._num_objects)
        if worker is not None:
            share = share_of_worker(len(share), worker_id=worker.id, num_workers=worker.num_workers)
        return self._items(share)


def share_of_worker(num_objects: int, *, worker_id: int, num_workers: int) -> range:
    """Return the consecutive indices of one worker; numbers of indices differ by one at most."""
    start, end = (num_objects * number // num_workers for number in (worker_id, worker_id + 1))
    return range(start, end)
