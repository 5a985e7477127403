"""Source: the objects of a bucket as they were listed, and the one way to read them."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from aioflux import sync
from aioflux._errors import TransientError
from aioflux._listing import Listing
from aioflux._policy import TransferOptions
from aioflux.compat.dataflux._account import Account
from aioflux.compat.dataflux._retry import policy_of
from aioflux.data._composing import prepare, read_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aioflux._meta import ObjectMeta
    from aioflux._policy import StoreOptions
    from aioflux.data._composing import Compose

__all__ = ["Entry", "SharedConfig", "Source"]

Entry = tuple[str, int]
"""Name and size of an object."""

_OLD_COMPOSITES = "dataflux-composed-objects/"
"""Where the old library put composites, and left some."""


class SharedConfig(Protocol):
    """What the `Config` of both datasets says."""

    max_composite_object_size: int
    prefix: str | None
    max_listing_retries: int
    list_retry_config: Any
    download_retry_config: Any


class Source:
    """Objects below a prefix, sorted by name, and a store that reads them.

    Pickles and forks without connections: each process opens its own on its first read.
    """

    def __init__(self, bucket_name: str, config: SharedConfig, storage_client: Any) -> None:
        """List the objects.

        Raises:
            StorageError: They cannot be listed, by its own type and naming the bucket.
        """
        self._uri = f"gs://{bucket_name}"
        self._account = Account(storage_client)
        self._retry = policy_of(config.download_retry_config)
        threads = getattr(config, "threads_per_process", 1)
        in_flight = max(TransferOptions().max_in_flight, threads)
        self._transfer = TransferOptions(max_in_flight=in_flight)
        self._max_composite_bytes = config.max_composite_object_size
        self._compose: Compose = "auto" if self._max_composite_bytes > 0 else "off"
        self._listing = self._list(config)
        self._objects: list[Entry] | None = None
        self._store: sync.Store | None = None

    def _list(self, config: SharedConfig) -> Sequence[ObjectMeta]:
        prefix = config.prefix or ""
        options: StoreOptions = {
            **self._account.options,
            "retry": policy_of(config.list_retry_config),
        }
        num_left = config.max_listing_retries
        # Closed before workers are forked, so that they inherit no connection of it.
        with sync.open_store(self._uri, **options) as store:
            while True:
                try:
                    listed = store.list_all(prefix)
                    break
                except TransientError:
                    num_left -= 1
                    if num_left <= 0:
                        raise
            self._compose = prepare(store, self._compose)
        if all(_is_sample(meta.key, prefix) for meta in listed):
            return listed
        return Listing(meta for meta in listed if _is_sample(meta.key, prefix))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    def __repr__(self) -> str:
        return f"{len(self)} objects of {self._uri}"

    def __len__(self) -> int:
        return len(self._listing if self._objects is None else self._objects)

    @property
    def objects(self) -> list[Entry]:
        """Name and size of each; what is changed here is what is read."""
        if self._objects is None:
            self._objects = [(meta.key, meta.size) for meta in self._listing]
        return self._objects

    @objects.setter
    def objects(self, entries: Iterable[Entry]) -> None:
        self._objects = list(entries)

    def read(self, positions: Iterable[int]) -> Iterator[tuple[ObjectMeta, bytes]]:
        """Yield `(meta, data)` of the objects at these positions, in this order, fetched ahead."""
        if self._store is None:
            options: StoreOptions = {
                **self._account.options,
                "transfer": self._transfer,
                "retry": self._retry,
            }
            self._store = sync.open_store(self._uri, **options)
        wanted = (self._at(position) for position in positions)
        batches = read_batches(
            self._store,
            wanted,
            compose=self._compose,
            max_composite_bytes=self._max_composite_bytes,
        )
        for batch in batches:
            yield from batch

    def _at(self, position: int) -> ObjectMeta | str:
        """Return what was listed of an object; its name alone where a caller has put it there."""
        if self._objects is None:
            return self._listing[position]
        name = self._objects[position][0]
        if position < len(self._listing) and self._listing[position].key == name:
            return self._listing[position]
        found = bisect_left(self._listing, name, key=attrgetter("key"))
        if found < len(self._listing) and self._listing[found].key == name:
            return self._listing[found]
        return name


def _is_sample(key: str, prefix: str) -> bool:
    """Tell whether it is neither a directory's stand-in nor a composite left behind."""
    is_composite = key.startswith(_OLD_COMPOSITES) and not prefix.startswith(_OLD_COMPOSITES)
    return not (is_composite or key.endswith("/"))
