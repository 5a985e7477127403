"""Source: the objects of a bucket as they were listed, and the one way to read them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol, cast

from aioflux import sync
from aioflux.compat.dataflux._account import Account
from aioflux.compat.dataflux._retry import policy_of
from aioflux.data._composites import prepare, read_batches
from aioflux.errors import StorageError, TransientError
from aioflux.options import TransferOptions

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.data._composites import Compose
    from aioflux.options import StoreOptions
    from aioflux.store import TriedBatch

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
        self._places: dict[str, int] | None = None
        self._store: sync.Store | None = None

    def _list(self, config: SharedConfig) -> Listing:
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
        kept = [at for at, key in enumerate(listed.keys) if _is_sample(key, prefix)]
        return listed if len(kept) == len(listed) else listed.pick(kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None, "_store": None}

    def __repr__(self) -> str:
        return f"{len(self)} objects of {self._uri}"

    def __len__(self) -> int:
        return len(self._listing if self._objects is None else self._objects)

    @property
    def objects(self) -> list[Entry]:
        """Name and size of each; what is changed here is what is read."""
        if self._objects is None:
            self._objects = list(zip(self._listing.keys, self._listing.sizes, strict=True))
        return self._objects

    @objects.setter
    def objects(self, entries: Iterable[Entry]) -> None:
        self._objects = list(entries)

    def read(self, positions: Sequence[int]) -> Generator[tuple[ObjectMeta, bytes], None, None]:
        """Yield `(meta, data)` of the objects at these positions, in this order, fetched ahead.

        Close it unless it is read to its end: an error that somebody keeps would keep it open.
        """
        if self._objects is None:
            wanted: Iterator[ObjectMeta | str] = map(self._listing.__getitem__, positions)
            is_listed = True
        else:
            names = [self._objects[position][0] for position in positions]
            places = self._listed_places()
            is_listed = all(name in places for name in names)
            wanted = (self._listing[places[name]] if name in places else name for name in names)
        batches = read_batches(
            self._opened(),
            wanted,
            # What is read by its name is not composed.
            compose=self._compose if is_listed else "off",
            max_composite_bytes=self._max_composite_bytes,
        )
        with closing(cast("Generator[TriedBatch, None, None]", batches)):
            for batch in batches:
                for meta, data in batch:
                    if isinstance(data, StorageError):
                        raise data
                    assert meta is not None
                    yield meta, data

    def _opened(self) -> sync.Store:
        if self._store is None:
            options: StoreOptions = {
                **self._account.options,
                "transfer": self._transfer,
                "retry": self._retry,
            }
            self._store = sync.open_store(self._uri, **options)
        return self._store

    def _listed_places(self) -> dict[str, int]:
        """Return where in the listing each name is."""
        if self._places is None:
            self._places = {key: place for place, key in enumerate(self._listing.keys)}
        return self._places


def _is_sample(key: str, prefix: str) -> bool:
    """Tell whether it is neither a directory's stand-in nor a composite left behind."""
    is_composite = key.startswith(_OLD_COMPOSITES) and not prefix.startswith(_OLD_COMPOSITES)
    return not (is_composite or key.endswith("/"))
