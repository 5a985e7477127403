"""What both datasets hold: objects below uris, as they were listed, and the way to read them."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux import sync
from aioflux._values.listing import KeyColumn, Listing
from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import Location, parse_uri, quote_path
from aioflux.data._composites import prepare
from aioflux.data._store_objects import Section
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from aioflux.data._store_objects import Access, Samples
    from aioflux.options import StoreOptions

__all__ = ["Objects"]


class Objects:
    """Objects below one uri or several, in a fixed order.

    Pickles and forks without connections: each process opens its own on its first read.

    Attributes:
        meter: Counts what is read.
    """

    def __init__(
        self,
        sections: Iterable[tuple[str, Listing | KeyColumn]],
        options: StoreOptions,
        access: Access,
    ) -> None:
        """Open stores, and leave no connection open, so that workers inherit none."""
        self.meter = access.meter
        self._sections: list[Section] = []
        self._num_objects = 0
        self._checksum: int | None = None
        for uri, items in sections:
            store = sync.open_store(uri, **options)
            way = _prepared(uri, items, options, access)
            self._sections.append(Section(self._num_objects, items, store, way))
            self._num_objects += len(items)
        self._starts = [section.start for section in self._sections]

    @classmethod
    def listed(cls, uris: Sequence[str], options: StoreOptions, access: Access) -> Self:
        """List what is below each uri.

        Raises:
            NotFoundError: There is no object below one of them.
            ValueError: There is no uri.
        """
        if not uris:
            raise ValueError("a dataset needs one uri at least")
        return cls([_list(uri, options) for uri in uris], options, access)

    @classmethod
    def of_manifests(cls, uris: Sequence[str], options: StoreOptions, access: Access) -> Self:
        """Take listings that were saved as objects.

        Raises:
            NotFoundError: There is no such object, or it lists none.
            ValueError: It is no listing.
        """
        if not uris:
            raise ValueError("a dataset needs one manifest at least")
        return cls([_open_manifest(uri, options) for uri in uris], options, access)

    @classmethod
    def named(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        options: StoreOptions,
        access: Access,
    ) -> Self:
        """Take keys, or metadata of a listing, as they are.

        Raises:
            TypeError: They are neither, or some of each.
        """
        if isinstance(keys, str):
            raise TypeError(f"keys must be an iterable of keys, not the string {keys!r}")
        if isinstance(keys, Listing):
            return cls([(uri, keys)], options, access)
        given: Sequence[str | ObjectMeta] = list(keys)
        names = [each for each in given if isinstance(each, str)]
        metas = [each for each in given if isinstance(each, ObjectMeta)]
        if len(names) == len(given):
            return cls([(uri, KeyColumn(names))], options, access)
        if len(metas) == len(given):
            return cls([(uri, Listing(metas))], options, access)
        kinds = ", ".join(sorted({type(each).__name__ for each in given}))
        raise TypeError(f"keys must all be strings or all be ObjectMeta, not {kinds}")

    @property
    def uri(self) -> str:
        """The uris that keys are relative to."""
        return ", ".join(section.store.uri for section in self._sections)

    def __len__(self) -> int:
        return self._num_objects

    def checksum(self) -> int:
        """Return a checksum of the keys in their order."""
        if self._checksum is None:  # 10 ms for a million objects, and asked for with each batch
            self._checksum = self._compute_checksum()
        return self._checksum

    def _compute_checksum(self) -> int:
        value = 0
        for section in self._sections:
            items = section.items
            keys = items.keys if isinstance(items, Listing) else items
            value = zlib.crc32(f"{section.store.uri} {keys.checksum()} ".encode(), value)
        return value

    def sizes(self, positions: Iterable[int]) -> list[int]:
        """Return the sizes of the objects at `positions`, in bytes.

        Raises:
            ValueError: They are known by name only.
        """
        columns = []
        for section in self._sections:
            if not isinstance(section.items, Listing):
                raise ValueError(  # noqa: TRY004  of keys this is a wrong setting
                    f"nothing tells the sizes of keys below {section.store.uri}; to share them by "
                    "bytes give ObjectMeta of a listing instead of keys"
                )
            columns.append(section.items.sizes)
        starts = self._starts
        if len(columns) == 1:
            return [columns[0][position] for position in positions]
        places = ((bisect_right(starts, position) - 1, position) for position in positions)
        return [columns[number][position - starts[number]] for number, position in places]

    def locate(self, position: int) -> tuple[sync.Store, ObjectMeta]:
        """Return where an object is, and what is known of it.

        Raises:
            TypeError: It is known by name only.
        """
        section = self._sections[self._section_at(position)]
        item = section.item(position)
        if isinstance(item, str):
            raise TypeError(f"nothing is known of {item!r} below {section.store.uri}")
        return section.store, item

    @property
    def are_known(self) -> bool:
        """Tell whether all have metadata, rather than names only."""
        return all(isinstance(section.items, Listing) for section in self._sections)

    @property
    def num_retries(self) -> int:
        """Requests of this process that repeated an earlier one."""
        return sum(section.store.stats.num_retries for section in self._sections)

    @property
    def read_ahead_bytes(self) -> int:
        """Bytes that are read ahead of a large object."""
        return self._sections[0].store.transfer.max_buffered_bytes

    @property
    def range_size_bytes(self) -> int:
        """Bytes that are read by one request at most."""
        return self._sections[0].store.transfer.range_size_bytes

    def read(self, positions: Sequence[int], *, is_ordered: bool = True) -> Samples:
        """Read the objects at `positions` within the limits of `TransferOptions`.

        Args:
            positions: Which ones.
            is_ordered: In that order; otherwise as they arrive.

        Returns:
            Samples, or the reasons why there is none, with their index in `positions`.
        """
        if len(self._sections) == 1:
            return self._sections[0].read(enumerate(positions), is_ordered=is_ordered)
        return self._read_in_turn(positions, is_ordered)

    def _read_in_turn(self, positions: Sequence[int], is_ordered: bool) -> Samples:
        """Read from all stores at once, each ahead of the consumer."""
        with ExitStack() as stack:
            streams = {}
            for position in positions:
                number = self._section_at(position)
                if number not in streams:
                    section = self._sections[number]
                    wanted = self._in_section(positions, number)
                    stream = section.read(wanted, is_ordered=is_ordered)
                    streams[number] = stack.enter_context(closing(stream))
                yield next(streams[number])

    def _in_section(self, positions: Sequence[int], number: int) -> Iterator[tuple[int, int]]:
        for index, position in enumerate(positions):
            if self._section_at(position) == number:
                yield index, position

    def _section_at(self, position: int) -> int:
        return bisect_right(self._starts, position) - 1


def _list(uri: str, options: StoreOptions) -> tuple[str, Listing]:
    with sync.open_store(uri, **options) as store:
        listing = store.list_all()
        uri = store.uri
    keys, sizes = listing.keys, listing.sizes
    kept = [at for at, size in enumerate(sizes) if size or not _is_marker(keys[at])]
    if len(kept) < len(listing):
        listing = listing.pick(kept)
    return uri, _not_empty(listing, uri, "check the spelling of the dataset's uri")


def _is_marker(key: str) -> bool:
    """Tell whether an empty object is what consoles put in place of an empty directory."""
    return key.endswith("/")


def _open_manifest(uri: str, options: StoreOptions) -> tuple[str, Listing]:
    location = parse_uri(uri)
    prefix, slash, key = location.key.rpartition("/")
    if not key:
        raise ValueError(f"{uri!r} names no object; a manifest is one")
    parent = str(Location(location.scheme, location.bucket, prefix + slash))
    with sync.open_store(parent, **options) as store:
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


def _prepared(
    uri: str, items: Listing | KeyColumn, options: StoreOptions, access: Access
) -> Access:
    """Check that this store can be read in this way, and sweep what dead composers left."""
    if not isinstance(items, Listing) and (access.cache or access.compose == "on"):
        what = "kept in a cache" if access.cache else "composed"
        raise ValueError(
            f"objects below {uri} cannot be {what} by their names alone; give ObjectMeta of a "
            "listing instead of keys"
        )
    if access.compose == "off":
        return access
    with sync.open_store(uri, **options) as store:
        return replace(access, compose=prepare(store, access.compose))
