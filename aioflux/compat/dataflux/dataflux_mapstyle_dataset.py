"""DataFluxMapStyleDataset: the map-style dataset of gcs-torch-dataflux, over aioflux."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index as as_index
from typing import Any, SupportsIndex

from torch.utils.data import Dataset

from aioflux.compat.dataflux._bucket_dataset import BucketDataset, data_format_default
from aioflux.compat.dataflux._retry import DEFAULT_POLICY, modified_retry

__all__ = ["Config", "DataFluxMapStyleDataset", "data_format_default"]


def __getattr__(name: str) -> Any:
    """Build `MODIFIED_RETRY` on access: it needs google-cloud-storage."""
    if name == "MODIFIED_RETRY":
        return modified_retry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class Config:
    """Options of a `DataFluxMapStyleDataset`, with the names and defaults of the old class."""

    sort_listing_results: bool = False
    """Without effect: listings are always sorted. By default the old class did not sort: the order
    differed between processes, so that ranks that divided the indices among themselves read some
    objects twice and others never."""
    max_composite_object_size: int = 100_000_000
    """Without effect: objects are read directly, and nothing is written to the bucket."""
    num_processes: int | None = field(default_factory=os.cpu_count)
    """Without effect: one process now lists faster than many processes of the old library."""
    prefix: str | None = None
    """Prefix of the names of the objects; None for all objects of the bucket."""
    max_listing_retries: int = 3
    """Number of listings to try, if the service or the network fails for longer than
    `list_retry_config` allows. Permanent errors, such as a missing bucket, are raised at once."""
    threads_per_process: int = 1
    """Number of requests in flight in each process. `TransferOptions.max_in_flight` is used if it
    is greater: fewer requests in flight would be slower and save nothing."""
    disable_compose: bool = False
    """Sets `max_composite_object_size` to 0; without another effect."""
    list_retry_config: Any = DEFAULT_POLICY
    """Retry policy for the listing: a `google.api_core.retry.Retry`, an `aioflux.RetryPolicy`, or
    None for no retry. By default the largest delay is 1 s at first, and grows by a factor of 1.5
    with each attempt, up to 30 s. The default deadline is 100,000 s: set a shorter one if a failure
    must be raised within a day."""
    download_retry_config: Any = DEFAULT_POLICY
    """Retry policy for downloads."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0


class DataFluxMapStyleDataset(BucketDataset, Dataset[Any]):
    """The objects of a bucket by index; each item is the result of `data_format_fn`.

    Differences from the old class, which require no change in programs:

    * Objects are sorted by name, the same in every process.
    * An object that cannot be read raises an error that names the object. The old class left the
      object out of the batch; if the permission to read was missing, it returned empty batches.
    * An object that was deleted or replaced after the listing raises NotFoundError. The old class
      cut composites by the listed sizes, and returned wrong bytes for all objects after this one.
    * Objects of all storage classes are listed. The old class listed only STANDARD.
    * A failed listing raises an error. The old class could return fewer objects, or none.
    * An object stored with `Content-Encoding: gzip` is always decompressed. The old class returned
      compressed bytes if the object was part of a composite.
    * Composites are used if the permissions allow it, and if they are faster than direct reads in a
      measurement of the first objects. The old class always used them, and failed without the
      permissions. Composites of a killed process are deleted when a dataset is built at least a day
      later. The old class did not delete them.
    * The dataset works with fork, spawn and forkserver, in threads, and while an event loop runs.
      Its pickle contains the endpoint and the credentials of `storage_client`. The old class used
      another client.

    As in the old class, objects are left out if their names end with "/" (web consoles create these
    to show directories) or are below `dataflux-composed-objects/`. A prefix without objects makes
    an empty dataset. Objects are not shared among ranks; use a `DistributedSampler`.
    """

    _default_config = Config

    def __len__(self) -> int:
        return self._num_objects

    def __getitem__(self, idx: SupportsIndex) -> Any:
        """Read the object at `idx`; a negative index counts from the end."""
        return DataFluxMapStyleDataset.__getitems__(self, [idx])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Read the objects at `indices` in parallel, for a batch of DataLoader.

        Raises:
            IndexError: An index is out of range.
            StorageError: An object cannot be read; the error names the object.
        """
        return list(self._items([self._checked_index(index) for index in indices]))

    def __iter__(self) -> Iterator[Any]:
        """Read all objects in order, with prefetching."""
        if type(self).__getitem__ is DataFluxMapStyleDataset.__getitem__:
            return self._items(range(len(self)))
        # A subclass that overrides `__getitem__` defines the items.
        return (self[index] for index in range(len(self)))

    def _checked_index(self, index: SupportsIndex) -> int:
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {number} is out of range for {self!r}")
        return number % len(self)
