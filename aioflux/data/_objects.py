"""What both datasets hold: objects below uris, as they were listed, and the way to read them."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioflux import sync
from aioflux._errors import NotFoundError
from aioflux._listing import KeyColumn, Listing
from aioflux._meta import ObjectMeta
from aioflux.data._sample import Sample

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from typing import Self

    from aioflux._policy import StoreOptions

__all__ = ["Objects"]


@dataclass(frozen=True)
class _Section:
    """Objects of one store; a position counts through all sections."""

    start: int
    items: Listing | KeyColumn
    store: sync.Store

    def read(
        self, wanted: Iterable[tuple[int, int]], *, is_ordered: bool
    ) -> Generator[tuple[int, Sample], None, None]:
        """Read `(index, position)` pairs, and give the index with each sample."""
        asked: deque[int] = deque()
        waiting: dict[str, deque[int]] = {}

        def items() -> Iterator[str | ObjectMeta]:
            for index, position in wanted:
                item = self.items[position - self.start]
                if is_ordered:
                    asked.append(index)
                else:
                    key = item if isinstance(item, str) else item.key
                    waiting.setdefault(key, deque()).append(index)
                yield item

        with closing(_batches(self.store, items(), is_ordered)) as batches:
            for batch in batches:
                for meta, data in batch:
                    if is_ordered:
                        index = asked.popleft()
                    else:
                        index = waiting[meta.key].popleft()
                        if not waiting[meta.key]:
                            del waiting[meta.key]
                    yield index, Sample(meta.key, data, meta)


def _batches(
    store: sync.Store, items: Iterable[str | ObjectMeta], is_ordered: bool
) -> Generator[list[tuple[ObjectMeta, bytes]], None, None]:
    yield from store.fetch_batches(items, ordered=is_ordered)


class Objects:
    """Objects below one uri or several, in a fixed order.

    Pickles and forks without connections: each process opens its own on its first read.
    """

    def __init__(self, sections: Iterable[tuple[str, Listing | KeyColumn]], options: StoreOptions):
        self._sections: list[_Section] = []
        self._num_objects = 0
        for uri, items in sections:
            store = sync.open_store(uri, **options)
            self._sections.append(_Section(self._num_objects, items, store))
            self._num_objects += len(items)
        self._starts = [section.start for section in self._sections]

    @classmethod
    def listed(cls, uris: Sequence[str], options: StoreOptions) -> Self:
        """List what is below each uri; leaves no connection open, so that workers inherit none.

        Raises:
            NotFoundError: There is no object below one of them.
        """
        return cls([_list(uri, options) for uri in uris], options)

    @classmethod
    def named(
        cls, uri: str, keys: Iterable[str] | Iterable[ObjectMeta], options: StoreOptions
    ) -> Self:
        """Take keys, or metadata of a listing, as they are.

        Raises:
            TypeError: They are neither, or some of each.
        """
        if isinstance(keys, str):
            raise TypeError(f"keys must be an iterable of keys, not the string {keys!r}")
        if isinstance(keys, Listing):
            return cls([(uri, keys)], options)
        given: Sequence[str | ObjectMeta] = list(keys)
        names = [each for each in given if isinstance(each, str)]
        metas = [each for each in given if isinstance(each, ObjectMeta)]
        if len(names) == len(given):
            return cls([(uri, KeyColumn(names))], options)
        if len(metas) == len(given):
            return cls([(uri, Listing(metas))], options)
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

    def uri_at(self, position: int) -> str:
        """Return the whole uri of an object."""
        section = self._sections[self._section_at(position)]
        item = section.items[position - section.start]
        return item.uri if isinstance(item, ObjectMeta) else section.store.uri + item

    def read(
        self, positions: Sequence[int], *, is_ordered: bool = True
    ) -> Generator[tuple[int, Sample], None, None]:
        """Read the objects at `positions` within the limits of `TransferOptions`.

        Args:
            positions: Which ones.
            is_ordered: In that order; otherwise as they arrive.

        Returns:
            Samples with their index in `positions`.
        """
        if len(self._sections) == 1:
            return self._sections[0].read(enumerate(positions), is_ordered=is_ordered)
        return self._read_in_turn(positions, is_ordered)

    def _read_in_turn(
        self, positions: Sequence[int], is_ordered: bool
    ) -> Generator[tuple[int, Sample], None, None]:
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
    listing = Listing()
    with sync.open_store(uri, **options) as store:
        for page in store.list_pages():
            listing.extend(meta for meta in page if not _is_marker(meta))
        uri = store.uri
    if not listing:
        raise NotFoundError(
            f"there is no object below {uri}; check the spelling of the dataset's uri", uri=uri
        )
    return uri, listing


def _is_marker(meta: ObjectMeta) -> bool:
    """Tell whether it is what consoles put in place of an empty directory."""
    return meta.size == 0 and meta.key.endswith("/")
