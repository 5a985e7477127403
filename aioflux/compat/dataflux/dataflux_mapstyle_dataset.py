"""DataFluxMapStyleDataset: the map-style dataset of gcs-torch-dataflux over aioflux."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from aioflux.compat.dataflux._bucket_dataset import BucketDataset, data_format_default
from aioflux.compat.dataflux._retry import DEFAULT_POLICY, modified_retry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import SupportsIndex


__all__ = ["Config", "DataFluxMapStyleDataset", "data_format_default"]


def __getattr__(name: str) -> Any:
    """Build `MODIFIED_RETRY` on access: it needs google-cloud-storage."""
    if name == "MODIFIED_RETRY":
        return modified_retry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class Config:
    """Options of a `DataFluxMapStyleDataset`, by their old names and with their old defaults."""

    sort_listing_results: bool = False
    """Without effect: listings are always sorted. Unsorted, as was the default, every process had
    an order of its own, and ranks that shared indices read some objects twice and others never."""
    max_composite_object_size: int = 100_000_000
    """Bytes of a composite, at most, 100 MB by default; 0 makes none. The old library
    exceeded it by whole objects; here it is a limit."""
    num_processes: int | None = field(default_factory=os.cpu_count)
    """Without effect: one process lists faster than many did."""
    prefix: str | None = None
    """Beginning of the names of the objects; all objects of the bucket by default."""
    max_listing_retries: int = 3
    """Attempts to list, at most, if the service or the network fails for longer than
    `list_retry_config` allows. Permanent errors, such as a missing bucket, are raised at once."""
    threads_per_process: int = 1
    """Requests in flight in each process, but at least `TransferOptions.max_in_flight`: fewer would
    be slower and save nothing."""
    disable_compose: bool = False
    """Sets `max_composite_object_size` to 0."""
    list_retry_config: Any = DEFAULT_POLICY
    """Retry policy of the listing: a `google.api_core.retry.Retry`, an
    `aioflux.RetryPolicy`, or None for never. By default delays of up to 1 s that grow 1.5-fold up
    to 30 s, for 100,000 s; set a deadline if a failure is to be raised within a day."""
    download_retry_config: Any = DEFAULT_POLICY
    """The same for downloads."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0


class DataFluxMapStyleDataset(BucketDataset, Dataset[Any]):
    """The objects of a bucket by index, as items that `data_format_fn` makes of their bytes.

    Differences from the old class, which need no change in code that uses it:

    * Objects are sorted by name, in every process alike.
    * An object that cannot be read raises, naming it. The old class left it out of the batch, and
      returned empty batches if it was not permitted to read.
    * An object that was deleted or replaced since the listing is a NotFoundError. The old class cut
      composites by the sizes that were listed, and shifted the bytes of all objects behind it.
    * Objects of every storage class are listed; the old class left out all but STANDARD.
    * A listing that fails raises its own error; the old class could return fewer objects, or
      none.
    * An object stored with `Content-Encoding: gzip` is decompressed, always; the old class left
      it compressed if it was part of a composite.
    * Composites are made if the permissions allow to create and delete them, and if they are faster
      than direct reads, both being measured on the first objects; those that a killed process left
      are removed by the next dataset, a day later. The old class always made them, and left some.
      Without the permissions objects are read directly; the old class failed.
    * It works with fork, spawn and forkserver, in threads, and while a loop is running. It pickles
      with the endpoint and the credentials of `storage_client`; the old class used another client.

    As in the old class, names that end with "/", which consoles put in place of directories, and
    objects below `dataflux-composed-objects/` are left out, and a prefix with no objects makes an
    empty dataset. It does not share objects among ranks: `DistributedSampler` does.
    """

    _default_config = Config

    def __len__(self) -> int:
        return self._num_objects

    def __getitem__(self, idx: SupportsIndex) -> Any:
        """Read the object at `idx`; a negative one counts from the end."""
        return DataFluxMapStyleDataset.__getitems__(self, [idx])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Read the objects at `indices` at once, in this order; DataLoader calls it for a batch.

        Raises:
            IndexError: An index is out of range.
            StorageError: An object cannot be read; the error names it.
        """
        return list(self._items([self._checked_index(index) for index in indices]))

    def __iter__(self) -> Iterator[Any]:
        """Read all objects in order, and prefetch."""
        if type(self).__getitem__ is DataFluxMapStyleDataset.__getitem__:
            return self._items(range(len(self)))
        # A subclass that overrides `__getitem__` defines the items.
        return (self[index] for index in range(len(self)))

    def _checked_index(self, index: SupportsIndex) -> int:
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {number} is out of range for {self!r}")
        return number % len(self)
