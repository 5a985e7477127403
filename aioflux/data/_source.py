"""Source: the listed objects of a dataset, with one `StoreReader` for each store."""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from aioflux import sync
from aioflux._values.listing import KeyColumn, Listing
from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import join_uri, split_object_uri
from aioflux.data._job_listing import listed_once
from aioflux.data._store_reader import StoreReader, prepare_composing
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux.data._job_listing import Listings, Sharing
    from aioflux.data._sample import Sample
    from aioflux.data._store_reader import FetchConfig, Samples
    from aioflux.errors import StorageError
    from aioflux.options import StoreOptions, TransferOptions

_log = logging.getLogger("aioflux")


Lister: TypeAlias = "Callable[[StoreOptions], Listings]"
"""Keys or manifests that constructors of datasets accept in place of a uri."""


class _StoreObjects(NamedTuple):
    """Objects of one store, consecutive in the listing of the source."""

    first_index: int
    """listing_index of the first object."""
    items: Listing | KeyColumn
    reader: StoreReader

    def item(self, listing_index: int) -> ObjectMeta | str:
        """Return the metadata of an object, or its key if the metadata is unknown."""
        return self.items[listing_index - self.first_index]


class Source:
    """Objects below one or several uris, in a fixed order.

    A listing_index counts through the objects of all uris. Copies in other processes, pickled or
    forked, start without connections and open new ones on the first read.
    """

    def __init__(
        self,
        listings: Listings,
        options: StoreOptions,
        config: FetchConfig,
    ) -> None:
        """Open the stores; no connection stays open, so that forked workers inherit none."""
        self._stores: list[_StoreObjects] = []
        self._num_objects = 0
        self._checksum: int | None = None
        for uri, items in listings:
            if not isinstance(items, Listing) and (config.cache or config.compose == "on"):
                action = "cached" if config.cache else "composed"
                raise ValueError(
                    f"objects below {uri} cannot be {action} without their metadata; pass the "
                    "ObjectMeta of a listing instead of keys"
                )
            if config.compose == "on":
                with sync.open_store(uri, **options) as opened:
                    prepare_composing(opened)
            reader = StoreReader(sync.open_store(uri, **options), config)
            self._stores.append(_StoreObjects(self._num_objects, items, reader))
            self._num_objects += len(items)
        self._first_indices = [store.first_index for store in self._stores]
        self.has_metadata = all(isinstance(store.items, Listing) for store in self._stores)
        """Whether the metadata of all objects is known, and not only the keys."""
        self.transfer: TransferOptions = self._stores[0].reader.store.transfer
        """Transfer options, the same for every store."""

    @property
    def uri(self) -> str:
        """Uris of all stores, separated by commas."""
        return ", ".join(objects.reader.store.uri for objects in self._stores)

    def __len__(self) -> int:
        return self._num_objects

    def checksum(self) -> int:
        """Return a checksum of the keys in listing order."""
        if self._checksum is None:  # 10 ms for a million keys; `state_dict` calls it every batch
            value = 0
            for _, items, reader in self._stores:
                keys = items.keys if isinstance(items, Listing) else items
                value = zlib.crc32(f"{reader.store.uri} {keys.checksum()} ".encode(), value)
            self._checksum = value
        return self._checksum

    def sizes(self, listing_indices: Iterable[int]) -> list[int]:
        """Return the sizes of objects, in bytes.

        Raises:
            ValueError: The dataset was built from keys, without metadata.
        """
        columns = []
        for _, items, reader in self._stores:
            if not isinstance(items, Listing):
                raise ValueError(  # noqa: TRY004  shard_by= and keys contradict each other
                    f"the sizes of the objects below {reader.store.uri} are unknown: the dataset "
                    "was built from keys; to share objects by bytes, pass the ObjectMeta of a "
                    "listing"
                )
            columns.append(items.sizes)
        if len(columns) == 1:
            return [columns[0][index] for index in listing_indices]
        first_indices = self._first_indices
        located = ((self._store_number(index), index) for index in listing_indices)
        return [columns[number][index - first_indices[number]] for number, index in located]

    def locate(self, listing_index: int) -> tuple[sync.Store, ObjectMeta]:
        """Return the store and the metadata of an object; the metadata must be known."""
        store = self._stores[self._store_number(listing_index)]
        item = store.item(listing_index)
        assert isinstance(item, ObjectMeta)
        return store.reader.store, item

    @property
    def num_retries(self) -> int:
        """Number of requests that were repeated, in this process."""
        return sum([sync.num_repeated(objects.reader.store) for objects in self._stores])

    def read(self, listing_indices: Sequence[int], *, is_ordered: bool = True) -> Samples:
        """Read objects, prefetched within the limits of `TransferOptions`.

        Args:
            listing_indices: Objects to read.
            is_ordered: Whether samples are yielded in the order of `listing_indices`. If False, the
                samples of each store are yielded in the order of arrival, unless there is a cache.

        Returns:
            Pairs of an index into `listing_indices` and the sample, or the error of that object.
        """
        if len(self._stores) > 1:
            return self._read_stores(listing_indices, is_ordered)
        _, items, reader = self._stores[0]
        return reader.read(
            enumerate(map(items.__getitem__, listing_indices)), is_ordered=is_ordered
        )

    def read_batch(self, listing_indices: Sequence[int]) -> list[Sample | StorageError]:
        """Read objects in parallel; return their samples in order, or the errors of objects."""
        if len(self._stores) > 1:
            return [sample for _, sample in self._read_stores(listing_indices, is_ordered=True)]
        _, items, reader = self._stores[0]
        return reader.read_batch([items[index] for index in listing_indices])

    def _read_stores(self, listing_indices: Sequence[int], is_ordered: bool) -> Samples:
        """Read objects of several stores; each store prefetches its own objects."""

        def objects_of(number: int) -> Iterator[tuple[int, ObjectMeta | str]]:
            for request_index, listing_index in enumerate(listing_indices):
                if self._store_number(listing_index) == number:
                    yield request_index, self._stores[number].item(listing_index)

        with ExitStack() as stack:
            streams: dict[int, Samples] = {}
            for listing_index in listing_indices:
                number = self._store_number(listing_index)
                if number not in streams:
                    reader = self._stores[number].reader
                    stream = reader.read(objects_of(number), is_ordered=is_ordered)
                    streams[number] = stack.enter_context(closing(stream))
                yield next(streams[number])

    def _store_number(self, listing_index: int) -> int:
        return bisect_right(self._first_indices, listing_index) - 1


def open_source(
    uri: str | Sequence[str] | Lister, options: StoreOptions, config: FetchConfig, sharing: Sharing
) -> Source:
    """Return the source of the objects below `uri`, or of those that the lister `uri` returns.

    Raises:
        NotFoundError: There is no object below a uri.
        ValueError: `uri` is an empty sequence, or not the same on all ranks.
    """
    if callable(uri):
        listings = uri(options)
    else:
        uris = _as_uris(uri)
        listings = listed_once(
            uris, options, sharing, lambda given: [_list(store_uri, given) for store_uri in uris]
        )
    return Source(listings, options, config)


def from_manifests(uri: str | Sequence[str]) -> Lister:
    """Return a lister that reads the listings from manifests."""
    uris = _as_uris(uri)
    return lambda options: [_open_manifest(each, options) for each in uris]


def from_keys(uri: str, keys: Iterable[str] | Iterable[ObjectMeta]) -> Lister:
    """Return a lister of the objects of the given keys or metadata, in the given order."""
    return lambda _options: [(uri, _column(keys))]


def _as_uris(uri: str | Sequence[str]) -> list[str]:
    uris = [uri] if isinstance(uri, str) else list(uri)
    if not uris:
        raise ValueError("pass at least one uri")
    return uris


def _column(keys: Iterable[str] | Iterable[ObjectMeta]) -> Listing | KeyColumn:
    if isinstance(keys, str):
        raise TypeError(f"keys must be an iterable of keys, not the string {keys!r}")
    if isinstance(keys, Listing):
        return keys
    items: Sequence[str | ObjectMeta] = list(keys)
    names = [item for item in items if isinstance(item, str)]
    metas = [item for item in items if isinstance(item, ObjectMeta)]
    if len(names) == len(items):
        return KeyColumn(names)
    if len(metas) == len(items):
        return Listing(metas)
    kinds = ", ".join(sorted({type(item).__name__ for item in items}))
    raise TypeError(f"keys must all be strings or all be ObjectMeta, not {kinds}")


def _list(uri: str, options: StoreOptions) -> tuple[str, Listing]:
    with sync.open_store(uri, **options) as store:
        listing, manifests = store.list_all().without_directories().without_manifests()
        uri = store.uri
    if manifests:
        _log.warning(
            "%s is the manifest of a dataset, and left out; from_manifest() reads what it lists",
            join_uri(uri, manifests[0]),
        )
    if not listing:
        message = f"there is no object below {uri}; check the spelling of the dataset's uri"
        raise NotFoundError(message, uri=uri)
    return uri, listing


def _open_manifest(uri: str, options: StoreOptions) -> tuple[str, Listing]:
    store_uri, key = split_object_uri(uri)
    with sync.open_store(store_uri, **options) as store:
        listing = Listing.from_bytes(store.get(key), uri=uri)
    if not listing:
        raise NotFoundError(f"the dataset is empty: the manifest {uri} lists no object", uri=uri)
    return listing.root, listing
