"""What both datasets hold: objects below one uri, as they were listed, and the way to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux import sync
from aioflux._errors import NotFoundError
from aioflux._listing import KeyColumn, Listing
from aioflux._meta import ObjectMeta
from aioflux.data._sample import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from aioflux._policy import StoreOptions

__all__ = ["Objects"]


class Objects:
    """Objects below one uri, in a fixed order.

    Pickles and forks without connections: each process opens its own on its first read.
    """

    def __init__(self, uri: str, items: Listing | KeyColumn, options: StoreOptions) -> None:
        self._items = items
        self._store = sync.open_store(uri, **options)

    @classmethod
    def listed(cls, uri: str, options: StoreOptions) -> Self:
        """List what is below `uri`; leaves no connection open, so that workers inherit none.

        Raises:
            NotFoundError: There is no object.
        """
        listing = Listing()
        with sync.open_store(uri, **options) as store:
            for page in store.list_pages():
                listing.extend(meta for meta in page if not _is_marker(meta))
            uri = store.uri
        if not listing:
            raise NotFoundError(
                f"there is no object below {uri}; check the spelling of the dataset's uri", uri=uri
            )
        return cls(uri, listing, options)

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
        given: Sequence[str | ObjectMeta] = list(keys)
        names = [each for each in given if isinstance(each, str)]
        metas = [each for each in given if isinstance(each, ObjectMeta)]
        if len(names) == len(given):
            return cls(uri, KeyColumn(names), options)
        if len(metas) == len(given):
            return cls(uri, Listing(metas), options)
        kinds = ", ".join(sorted({type(each).__name__ for each in given}))
        raise TypeError(f"keys must all be strings or all be ObjectMeta, not {kinds}")

    @property
    def uri(self) -> str:
        """The uri that keys are relative to."""
        return self._store.uri

    def __len__(self) -> int:
        return len(self._items)

    def read(self, indices: Iterable[int]) -> Iterator[Sample]:
        """Read the objects at `indices`, in that order, within the limits of `TransferOptions`."""
        wanted = (self._items[index] for index in indices)
        for batch in self._store.fetch_batches(wanted):
            for meta, data in batch:
                yield Sample(meta.key, data, meta)


def _is_marker(meta: ObjectMeta) -> bool:
    """Tell whether it is what consoles put in place of an empty directory."""
    return meta.size == 0 and meta.key.endswith("/")
