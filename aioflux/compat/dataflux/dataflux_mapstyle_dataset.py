"""DataFluxMapStyleDataset: the map-style dataset of gcs-torch-dataflux over aioflux."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from aioflux.compat.dataflux._formats import data_format_default, formatted
from aioflux.compat.dataflux._retry import DEFAULT_POLICY, modified_retry
from aioflux.compat.dataflux._source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import SupportsIndex

    from aioflux.compat.dataflux._source import Entry, SharedConfig

__all__ = ["Config", "DataFluxMapStyleDataset", "data_format_default"]


def __getattr__(name: str) -> Any:
    """Build `MODIFIED_RETRY` where it is asked for: it needs google-cloud-storage."""
    if name == "MODIFIED_RETRY":
        return modified_retry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class Config:
    """Options of a `DataFluxMapStyleDataset`, by their old names and with their old defaults."""

    sort_listing_results: bool = False
    """Without effect: listings are always sorted. Unsorted, as was the default, every process had
    an order of its own, and ranks that dealt out indices read some objects twice and others
    never."""
    max_composite_object_size: int = 100_000_000
    """Bytes of a composite, at most, 100 MB by default; 0 makes none. The old library took it for a
    hint and exceeded it by whole objects; here it is a limit."""
    num_processes: int | None = field(default_factory=os.cpu_count)
    """Without effect: one process lists faster than many did."""
    prefix: str | None = None
    """Beginning of the names of the objects; all objects of the bucket by default."""
    max_listing_retries: int = 3
    """Listings begun, at most, where the service or the network fails for longer than
    `list_retry_config` allows. What will not pass, such as a missing bucket, is raised at once."""
    threads_per_process: int = 1
    """Requests under way at once in each process. Numbers below that of
    `TransferOptions.max_in_flight` mean that: fewer would be slower and save nothing."""
    disable_compose: bool = False
    """Sets `max_composite_object_size` to 0."""
    list_retry_config: Any = DEFAULT_POLICY
    """When a failed request of the listing is sent again: a `google.api_core.retry.Retry`, an
    `aioflux.RetryPolicy`, or None for never. By default delays of up to 1 s that grow 1.5-fold up
    to 30 s, for 100,000 s: a day and more, so set a deadline where you would want to be told."""
    download_retry_config: Any = DEFAULT_POLICY
    """The same for downloads."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0


class DataFluxMapStyleDataset(Dataset[Any]):
    """The objects of a bucket by index, as `data_format_fn` makes them of their bytes.

    Where it differs from the old class, which needs no change in code that uses it:

    * Objects are sorted by name, in every process alike.
    * An object that cannot be read raises, naming it. The old class left it out of the batch, and
      handed out empty batches where it might not read at all.
    * An object that was deleted or replaced since the listing is a NotFoundError. The old class cut
      composites by the sizes that were listed, and shifted the bytes of what came after.
    * Objects of every storage class are listed; the old class left out all but STANDARD.
    * A listing that fails raises its own error; the old class could come up with fewer objects,
      or none.
    * An object stored with `Content-Encoding: gzip` is decompressed, always; the old class handed
      it out compressed where it was part of a composite.
    * Composites are made where they are allowed, may be created and deleted, and were found to be
      faster than direct reads, both being measured on the first objects; what is left of them by a
      process that was killed is removed by the next dataset, a day later. The old class always made
      them, and left some. Without the permissions objects are read directly; the old class failed.
    * It works with fork, spawn and forkserver, in threads, and where a loop is running. It pickles
      with the endpoint and the credentials of `storage_client`, where the old class came up with
      another client; see `__init__`.

    As in the old class, names that end with "/", which consoles put in place of directories, and
    what is below `dataflux-composed-objects/` are left out, and a prefix with no objects makes an
    empty dataset. It does not share objects among ranks: `DistributedSampler` does.
    """

    def __init__(
        self,
        project_name: str,
        bucket_name: str,
        config: SharedConfig | None = None,
        data_format_fn: Callable[[bytes], Any] = data_format_default,
        storage_client: Any = None,
    ) -> None:
        """List the objects.

        Args:
            project_name: Kept, and of no effect: names of buckets are unique.
            bucket_name: Name of the bucket.
            config: Options; `Config()` by default.
            data_format_fn: Makes an item of the bytes of an object, in the process that reads it.
                With spawn and forkserver workers it must pickle.
            storage_client: A `google.cloud.storage.Client` whose endpoint and credentials are taken
                over. Both go along to workers; into any other pickle go anonymous credentials
                alone, and others are a TypeError. By default Application Default Credentials, or
                none where the environment variable STORAGE_EMULATOR_HOST names an emulator.

        Raises:
            StorageError: The objects cannot be listed.
        """
        super().__init__()
        self.storage_client = storage_client
        self.project_name = project_name
        self.bucket_name = bucket_name
        self.data_format_fn = data_format_fn
        self.config = config or Config()
        self._source = Source(bucket_name, self.config, storage_client)

    @property
    def objects(self) -> list[Entry]:
        """Name and size in bytes of each object, sorted by name.

        The list may be changed or replaced, as to take a share of it: what is in it is what is
        read. Objects that were listed are read as they were then, others as they are.
        """
        return self._source.objects

    @objects.setter
    def objects(self, entries: Iterable[Entry]) -> None:
        self._source.objects = entries

    def __repr__(self) -> str:
        return f"<DataFluxMapStyleDataset of {self._source!r}>"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, idx: SupportsIndex) -> Any:
        """Read the object at `idx`; a negative one counts from the end."""
        return DataFluxMapStyleDataset.__getitems__(self, [idx])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Read the objects at `indices` at once, in this order; DataLoader calls it for a batch.

        Raises:
            IndexError: There are not so many objects.
            StorageError: The first object that cannot be read, named.
        """
        return list(self._items([self._position(index) for index in indices]))

    def __iter__(self) -> Iterator[Any]:
        """Read all objects in order, ahead of the consumer."""
        if type(self).__getitem__ is DataFluxMapStyleDataset.__getitem__:
            return self._items(range(len(self)))
        # A subclass has items of its own.
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # Google's clients refuse to pickle. The source has what is needed of it.
        return {**self.__dict__, "storage_client": None}

    def _items(self, positions: Sequence[int]) -> Iterator[Any]:
        with closing(self._source.read(positions)) as read:
            for meta, data in read:
                yield formatted(meta, data, self.data_format_fn)

    def _position(self, index: SupportsIndex) -> int:
        position = as_index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is out of range for {self!r}")
        return position % len(self)
