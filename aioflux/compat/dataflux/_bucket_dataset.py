"""BucketDataset, the base class of both datasets: the listed objects of a bucket."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

from aioflux import sync
from aioflux.compat.dataflux._account import Account
from aioflux.compat.dataflux._retry import policy_of
from aioflux.data._store_reader import FetchConfig, StoreReader
from aioflux.errors import StorageError, TransientError
from aioflux.options import TransferOptions

if TYPE_CHECKING:
    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.data import Sample
    from aioflux.options import StoreOptions

Entry = tuple[str, int]
"""Name and size of an object."""

_OLD_COMPOSITES = "dataflux-composed-objects/"
"""Prefix of composites that the old library created and did not always delete."""


def data_format_default(data: bytes) -> bytes:
    """Return the bytes as they are."""
    return data


class SharedConfig(Protocol):
    """Fields of the `Config` of both datasets."""

    prefix: str | None
    max_listing_retries: int
    list_retry_config: Any
    download_retry_config: Any


class BucketDataset:
    """Base class of both datasets: the objects below a prefix, sorted by name.

    Copies in other processes, pickled or forked, start without connections and open their own on
    the first read.
    """

    _default_config: Callable[[], SharedConfig]

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
            project_name: Without effect: names of buckets are unique.
            bucket_name: Name of the bucket.
            config: Options; `Config()` by default.
            data_format_fn: Called with the bytes of an object, in the process that reads it;
                returns the item. Spawn and forkserver workers need a function that can be pickled.
            storage_client: A `google.cloud.storage.Client` whose endpoint and credentials are used.
                Both are pickled for workers; other pickles raise TypeError unless the credentials
                are anonymous. By default Application Default Credentials are used, or no
                credentials if the environment variable STORAGE_EMULATOR_HOST names an emulator.

        Raises:
            StorageError: The objects cannot be listed.
        """
        super().__init__()
        self.storage_client = storage_client
        self.project_name = project_name
        self.bucket_name = bucket_name
        self.data_format_fn = data_format_fn
        self.config = config or self._default_config()
        self._uri = f"gs://{bucket_name}"
        self._account = Account(storage_client)
        self._retry = policy_of(self.config.download_retry_config)
        threads = getattr(self.config, "threads_per_process", 1)
        in_flight = max(TransferOptions().max_in_flight, threads)
        self._transfer = TransferOptions(max_in_flight=in_flight)
        self._fetch_config = FetchConfig()
        self._listing = self._list()
        self._objects: list[Entry] | None = None
        self._listing_indices: dict[str, int] | None = None
        self._store: sync.Store | None = None

    def _list(self) -> Listing:
        prefix = self.config.prefix or ""
        options: StoreOptions = {
            **self._account.options,
            "retry": policy_of(self.config.list_retry_config),
        }
        num_attempts = self.config.max_listing_retries
        # Close the store here, so that forked workers inherit no connection.
        with sync.open_store(self._uri, **options) as store:
            while True:
                try:
                    listing = store.list_all(prefix)
                    break
                except TransientError:
                    num_attempts -= 1
                    if num_attempts <= 0:
                        raise
        indices = [index for index, key in enumerate(listing.keys) if _is_sample(key, prefix)]
        return listing if len(indices) == len(listing) else listing.pick(indices)

    @property
    def objects(self) -> list[Entry]:
        """Name and size in bytes of each object, sorted by name.

        The list may be changed or replaced, for example by a share of it; the dataset then reads
        the objects of the new list. Objects that were listed at the start are read in the listed
        generation, and all other objects in their newest generation.
        """
        if self._objects is None:
            self._objects = list(zip(self._listing.keys, self._listing.sizes, strict=True))
        return self._objects

    @objects.setter
    def objects(self, entries: Iterable[Entry]) -> None:
        self._objects = list(entries)

    @property
    def _num_objects(self) -> int:
        return len(self._listing if self._objects is None else self._objects)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._num_objects} objects of {self._uri}>"

    def __getstate__(self) -> dict[str, Any]:
        # Clients cannot be pickled. `_account` has a copy of endpoint and credentials.
        return {**self.__dict__, "storage_client": None, "_listing_indices": None, "_store": None}

    def _items(self, indices: Sequence[int]) -> Iterator[Any]:
        """Read objects, prefetched, and yield their items in the order of `indices`."""
        if self._objects is None:
            objects: Iterator[ObjectMeta | str] = map(self._listing.__getitem__, indices)
        else:
            names = [self._objects[index][0] for index in indices]
            listed = self._index_by_name()
            objects = (self._listing[listed[name]] if name in listed else name for name in names)
        # Close the generator here: the traceback of an error would keep it and its requests alive.
        reader = StoreReader(self._opened(), self._fetch_config)
        with closing(reader.read(enumerate(objects))) as samples:
            for _, sample in samples:
                if isinstance(sample, StorageError):
                    raise sample
                yield _format(sample, self.data_format_fn)

    def _opened(self) -> sync.Store:
        if self._store is None:
            options: StoreOptions = {
                **self._account.options,
                "transfer": self._transfer,
                "retry": self._retry,
            }
            self._store = sync.open_store(self._uri, **options)
        return self._store

    def _index_by_name(self) -> dict[str, int]:
        """Return the listing_index of each name."""
        if self._listing_indices is None:
            self._listing_indices = {key: index for index, key in enumerate(self._listing.keys)}
        return self._listing_indices


def _is_sample(key: str, prefix: str) -> bool:
    """Return whether an object is neither the placeholder of a directory nor a composite."""
    is_composite = key.startswith(_OLD_COMPOSITES) and not prefix.startswith(_OLD_COMPOSITES)
    return not (is_composite or key.endswith("/"))


def _format(sample: Sample, data_format_fn: Callable[[bytes], Any]) -> Any:
    """Return the item of an object; an exception has a note with the uri of the object.

    Objects stored with `Content-Encoding: gzip` are decompressed, as by google-cloud-storage.
    """
    data = sample.data
    try:
        if sample.meta.content_encoding == "gzip":
            data = gzip.decompress(data)
        return data_format_fn(data)
    except Exception as exc:
        exc.add_note(f"while formatting {sample.uri}")
        raise
