"""Source: the objects of a dataset, as they were listed, and the readers of their stores."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from aioflux import sync
from aioflux._values.listing import KeyColumn, Listing
from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import quote_path, split_object_uri
from aioflux.data._store_reader import StoreReader
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.data._store_reader import FetchConfig, Samples
    from aioflux.options import StoreOptions, TransferOptions

__all__ = ["Source", "SourceOpener", "from_keys", "from_manifests", "open_source"]

SourceOpener: TypeAlias = Callable[["StoreOptions", "FetchConfig"], "Source"]


class _StoreObjects(NamedTuple):
    """Objects of one store, which follow each other in the listing of all."""

    first_index: int
    """listing_index of the first."""
    items: Listing | KeyColumn
    reader: StoreReader

    def item(self, listing_index: int) -> ObjectMeta | str:
        """Return the metadata of an object, or its key if that is all that is known."""
        return self.items[listing_index - self.first_index]


class Source:
    """Objects below one uri or several, in a fixed order; a listing_index counts through all.

    Pickles and forks without connections: each process opens its own on its first read.
    """

    def __init__(
        self,
        listings: Iterable[tuple[str, Listing | KeyColumn]],
        options: StoreOptions,
        config: FetchConfig,
    ) -> None:
        """Open stores, and leave no connection open, so that workers inherit none."""
        self._stores: list[_StoreObjects] = []
        self._num_objects = 0
        self._checksum: int | None = None
        for uri, items in listings:
            _check_has_metadata(uri, items, config)
            prepared = config
            if config.compose != "off":
                with sync.open_store(uri, **options) as opened:
                    prepared = config.prepared_for(opened)
            reader = StoreReader(sync.open_store(uri, **options), prepared)
            self._stores.append(_StoreObjects(self._num_objects, items, reader))
            self._num_objects += len(items)
        self._first_indices = [store.first_index for store in self._stores]

    @property
    def uri(self) -> str:
        """The uris that keys are relative to."""
        return ", ".join(each.reader.store.uri for each in self._stores)

    def __len__(self) -> int:
        return self._num_objects

    def checksum(self) -> int:
        """Return a checksum of the keys in their order."""
        if self._checksum is None:  # 10 ms for a million objects, and needed with each batch
            value = 0
            for _, items, reader in self._stores:
                keys = items.keys if isinstance(items, Listing) else items
                value = zlib.crc32(f"{reader.store.uri} {keys.checksum()} ".encode(), value)
            self._checksum = value
        return self._checksum

    def sizes(self, listing_indices: Iterable[int]) -> list[int]:
        """Return the sizes of objects, in bytes.

        Raises:
            ValueError: Only keys are known.
        """
        columns = []
        for _, items, reader in self._stores:
            if not isinstance(items, Listing):
                raise ValueError(  # noqa: TRY004  of keys this is a wrong setting
                    f"the sizes of keys below {reader.store.uri} are unknown; to share them by "
                    "bytes give ObjectMeta of a listing instead of keys"
                )
            columns.append(items.sizes)
        if len(columns) == 1:
            return [columns[0][index] for index in listing_indices]
        firsts = self._first_indices
        located = ((self._store_number(index), index) for index in listing_indices)
        return [columns[number][index - firsts[number]] for number, index in located]

    def locate(self, listing_index: int) -> tuple[sync.Store, ObjectMeta]:
        """Return the store and the metadata of an object of a listing."""
        store = self._stores[self._store_number(listing_index)]
        item = store.item(listing_index)
        assert isinstance(item, ObjectMeta)
        return store.reader.store, item

    @property
    def has_metadata(self) -> bool:
        """Return whether the metadata of all objects is known, rather than keys only."""
        return all(isinstance(each.items, Listing) for each in self._stores)

    @property
    def num_retries(self) -> int:
        """Requests of this process that repeated an earlier one."""
        return sum(each.reader.store.stats.num_retries for each in self._stores)

    @property
    def transfer(self) -> TransferOptions:
        """Limits of each store."""
        return self._stores[0].reader.store.transfer

    def read(self, listing_indices: Sequence[int], *, is_ordered: bool = True) -> Samples:
        """Prefetch objects within the limits of `TransferOptions`.

        Args:
            listing_indices: Objects to read.
            is_ordered: Yield them in that order; otherwise as they arrive.

        Returns:
            Samples, or the errors of objects, with their indices in `listing_indices`.
        """
        if len(self._stores) > 1:
            return self._read_stores(listing_indices, is_ordered)
        _, items, reader = self._stores[0]
        return reader.read(
            enumerate(map(items.__getitem__, listing_indices)), is_ordered=is_ordered
        )

    def _read_stores(self, listing_indices: Sequence[int], is_ordered: bool) -> Samples:
        """Prefetch from all stores at once."""

        def wanted(number: int) -> Iterator[tuple[int, ObjectMeta | str]]:
            for request_index, listing_index in enumerate(listing_indices):
                if self._store_number(listing_index) == number:
                    yield request_index, self._stores[number].item(listing_index)

        with ExitStack() as stack:
            streams: dict[int, Samples] = {}
            for listing_index in listing_indices:
                number = self._store_number(listing_index)
                if number not in streams:
                    reader = self._stores[number].reader
                    stream = reader.read(wanted(number), is_ordered=is_ordered)
                    streams[number] = stack.enter_context(closing(stream))
                yield next(streams[number])

    def _store_number(self, listing_index: int) -> int:
        return bisect_right(self._first_indices, listing_index) - 1


def open_source(
    uri: str | Sequence[str] | SourceOpener, options: StoreOptions, config: FetchConfig
) -> Source:
    """List the objects below uris, or open those that `from_keys` or `from_manifests` name.

    Raises:
        NotFoundError: There is no object below a uri.
        ValueError: There is no uri.
    """
    if callable(uri):
        return uri(options, config)
    return Source([_list(each, options) for each in _as_uris(uri)], options, config)


def from_manifests(uri: str | Sequence[str]) -> SourceOpener:
    """Return the opener of a source whose listings were saved as manifests."""
    uris = _as_uris(uri)
    return lambda options, config: Source(
        [_open_manifest(each, options) for each in uris], options, config
    )


def from_keys(uri: str, keys: Iterable[str] | Iterable[ObjectMeta]) -> SourceOpener:
    """Return the opener of a source of given keys, or of given metadata, in their order."""
    return lambda options, config: Source([(uri, _column(keys))], options, config)


def _as_uris(uri: str | Sequence[str]) -> list[str]:
    uris = [uri] if isinstance(uri, str) else list(uri)
    if not uris:
        raise ValueError("a dataset needs one uri at least")
    return uris


def _column(keys: Iterable[str] | Iterable[ObjectMeta]) -> Listing | KeyColumn:
    if isinstance(keys, str):
        raise TypeError(f"keys must be an iterable of keys, not the string {keys!r}")
    if isinstance(keys, Listing):
        return keys
    given: Sequence[str | ObjectMeta] = list(keys)
    names = [each for each in given if isinstance(each, str)]
    metas = [each for each in given if isinstance(each, ObjectMeta)]
    if len(names) == len(given):
        return KeyColumn(names)
    if len(metas) == len(given):
        return Listing(metas)
    kinds = ", ".join(sorted({type(each).__name__ for each in given}))
    raise TypeError(f"keys must all be strings or all be ObjectMeta, not {kinds}")


def _list(uri: str, options: StoreOptions) -> tuple[str, Listing]:
    with sync.open_store(uri, **options) as store:
        listing = store.list_all()
        uri = store.uri
    keys, sizes = listing.keys, listing.sizes
    # Consoles put empty objects that end with "/" in place of empty directories.
    kept = [index for index, size in enumerate(sizes) if size or not keys[index].endswith("/")]
    if len(kept) < len(listing):
        listing = listing.pick(kept)
    return uri, _not_empty(listing, uri, "check the spelling of the dataset's uri")


def _open_manifest(uri: str, options: StoreOptions) -> tuple[str, Listing]:
    store_uri, key = split_object_uri(uri)
    with sync.open_store(store_uri, **options) as store:
        data = store.get(key)
    try:
        listing = Listing.from_bytes(data)
    except ValueError as exc:
        exc.add_note(f"while opening the manifest {uri}")
        raise
    _not_empty(listing, uri, "save the manifest again")
    first = listing[0]
    key = quote_path(first.key) if first.uri.startswith("file://") else first.key
    return first.uri.removesuffix(key), listing


def _not_empty(listing: Listing, uri: str, hint: str) -> Listing:
    if not listing:
        raise NotFoundError(f"there is no object below {uri}; {hint}", uri=uri)
    return listing


def _check_has_metadata(uri: str, items: Listing | KeyColumn, config: FetchConfig) -> None:
    if not isinstance(items, Listing) and (config.cache or config.compose == "on"):
        what = "kept in a cache" if config.cache else "composed"
        raise ValueError(
            f"objects below {uri} cannot be {what} by their keys alone; give ObjectMeta of a "
            "listing instead of keys"
        )
