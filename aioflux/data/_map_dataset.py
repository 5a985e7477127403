"""MapDataset: objects by index."""

from __future__ import annotations

from contextlib import closing, suppress
from operator import index as as_index
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import Dataset, get_worker_info

from aioflux.data._batch_prefetch import BatchPrefetcher
from aioflux.data._error_policy import ErrorPolicy, worker_errors
from aioflux.data._options import BATCH_TRANSFER, unknown_option_error
from aioflux.data._sample import Item, Item_co
from aioflux.data._source import from_keys, from_manifests, open_source
from aioflux.data._store_reader import DEFAULT_CACHE_BYTES, FetchConfig
from aioflux.data._transform import apply_transform, check_pickles
from aioflux.errors import StorageError

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Never, SupportsIndex, Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._composed_read import Compose
    from aioflux.data._counters import LoadStats
    from aioflux.data._epoch import EpochPlanner
    from aioflux.data._error_policy import OnError
    from aioflux.data._options import MapOptions
    from aioflux.data._sample import Sample
    from aioflux.data._source import SourceOpener
    from aioflux.data._store_reader import Samples
    from aioflux.options import RetryPolicy, Timeouts, TransferOptions

__all__ = ["MapDataset"]


class MapDataset(Dataset[Item_co]):
    """The objects below a uri as a dataset with a length and indices, sorted by key.

    Lists once, when it is built. Reads are pinned to the generations that were listed: an object
    that was deleted or replaced since is a NotFoundError that names it, also through DataLoader.
    DataLoader reads the objects of a batch at once. Its workers prefetch the next batches, within
    the limits of `TransferOptions`, if these are predictable: if batches are not shuffled, or an
    `ObjectSampler` shuffles them, as in `loader`. Objects of which only keys are known are not
    prefetched.

    Objects of size 0 whose key ends with "/" are left out: consoles put them in place of empty
    directories.

    Without a transform the items are `Sample`, which DataLoader's default collate rejects:
    give a transform that returns tensors, numbers, strings or tuples of these, or `DataLoader(...,
    collate_fn=list)` for lists of samples. With spawn or forkserver workers the transform must
    pickle, as a function at the top of a module does.
    """

    def __init__(
        self,
        uri: str | Sequence[str] | SourceOpener,
        *,
        transform: Callable[[Sample], Item_co] | None = None,
        on_error: OnError = "raise",
        compose: Compose = "off",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        transfer: TransferOptions | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        credentials: Any = None,
        endpoint_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        **unknown: Never,
    ) -> None:
        """List the objects below `uri`.

        Args:
            uri: As in `aioflux.open_store`; keys are relative to it. Of several uris the objects
                follow each other; limits hold for each uri by itself.
            transform: Makes an item of a `Sample`, in the process that reads it.
            on_error: "skip" logs objects that cannot be read or transformed, counts them in
                `stats.num_skipped` and leaves them out of their batch; a function of the error and
                the uri may also raise. An empty batch is always an error.
            compose: "on" composes small objects on the service and reads many at once; "auto"
                measures both on the first objects, and keeps the faster.
            cache: Local directory that keeps objects between epochs and runs; cached objects are
                not requested again.
            cache_bytes: Size of the cache, at most; 64 GiB by default.
            transfer: As in `aioflux.open_store`, like all that follow, but with 128 requests in
                flight by default, so that a batch of 100 is read at once. Limits hold for each
                DataLoader worker by itself.
            retry: As in `aioflux.open_store`.
            timeouts: As in `aioflux.open_store`.
            credentials: As in `aioflux.open_store`.
            endpoint_url: As in `aioflux.open_store`.
            ssl_context: As in `aioflux.open_store`.
            unknown: Other keywords are a TypeError, which names the right place of some.

        Raises:
            NotFoundError: There is no object below `uri`.
        """
        if unknown:
            raise unknown_option_error(type(self), unknown)
        config = FetchConfig.with_cache(cache, cache_bytes=cache_bytes, compose=compose)
        self._transform = transform
        self._counters = config.counters
        self._errors = ErrorPolicy(on_error, self._counters)
        self._source = open_source(
            uri,
            {
                "transfer": transfer or BATCH_TRANSFER,
                "retry": retry,
                "timeouts": timeouts,
                "credentials": credentials,
                "endpoint_url": endpoint_url,
                "ssl_context": ssl_context,
            },
            config,
        )
        self._planner: EpochPlanner | None = None
        """Planner of the sampler that was built last for this dataset."""
        # Taken out while it is used: a transform may read other objects meanwhile, or a thread.
        self._prefetchers = [BatchPrefetcher()]

    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Sample], Item] | None = None,
        **options: Unpack[MapOptions],
    ) -> MapDataset[Item]:
        """Build a dataset of these objects, in this order, without a listing.

        Args:
            uri: Prefix that the keys are relative to.
            keys: Keys, read in the generation that they have then; or metadata of a listing, which
                pins generations.
            transform: As for the class.
            options: As for the class.
        """
        dataset: MapDataset[Item] = cast("MapDataset[Item]", cls.__new__(cls))
        MapDataset.__init__(dataset, from_keys(uri, keys), transform=transform, **options)
        return dataset

    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Sample], Item] | None = None,
        **options: Unpack[MapOptions],
    ) -> MapDataset[Item]:
        """Build a dataset of a listing that `Store.save_manifest` or `aioflux ls` has saved.

        One request, however many objects there are, and the same objects in every process and run.

        Args:
            uri: Uri of the manifest, or of several.
            transform: As for the class.
            options: As for the class.

        Raises:
            NotFoundError: There is no such object, or it lists none.
            ValueError: It is not a manifest, or a damaged one.
        """
        dataset: MapDataset[Item] = cast("MapDataset[Item]", cls.__new__(cls))
        MapDataset.__init__(dataset, from_manifests(uri), transform=transform, **options)
        return dataset

    def __getstate__(self) -> dict[str, Any]:
        check_pickles(transform=self._transform)
        return self.__dict__

    def __repr__(self) -> str:
        return f"<MapDataset of {len(self)} objects below {self._source.uri}>"

    def __len__(self) -> int:
        return len(self._source)

    @property
    def has_transform(self) -> bool:
        """Return whether items are results of a transform, rather than samples."""
        return self._transform is not None

    @property
    def stats(self) -> LoadStats:
        """Objects read and skipped, and times, of this process and its workers so far."""
        return self._counters.snapshot()

    def __getitem__(self, index: SupportsIndex) -> Item_co:
        """Read the object at `index`; a negative one counts from the end.

        Raises:
            IndexError: There are fewer objects.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Item_co]:
        """Read the objects at `indices` at once, in this order; DataLoader calls it for each batch.

        Raises:
            StorageError: The first object that cannot be read, named; with `on_error`, only if none
                can be read.
        """
        listing_indices = [self._listing_index(index) for index in indices]
        errors = self._errors
        errors.last_skipped = None
        with worker_errors():
            items = list(self._items(listing_indices))
            if indices and not items and errors.last_skipped is not None:
                raise errors.last_skipped
        return items

    def __iter__(self) -> Iterator[Item_co]:
        """Read all objects in order, with prefetching.

        Without this, Python would call `__getitem__` with one index after the other until an
        IndexError, which a transform may raise for reasons of its own.

        Raises:
            StorageError: An object cannot be read, named; with `on_error`, it is left out.
        """
        return self._items(range(len(self)))

    def _items(self, listing_indices: Sequence[int]) -> Iterator[Item_co]:
        errors, counters = self._errors, self._counters.start_clock()
        # Outside workers, prefetched objects that are not read would never be dropped; and objects
        # that are not pinned could be read long before a later epoch.
        is_prefetched = get_worker_info() is not None and self._source.has_metadata
        read = self._prefetched if is_prefetched else self._source.read
        try:
            # Closed at once: an error keeps this frame, and so the generator, alive.
            with closing(read(listing_indices)) as samples:
                for _, sample in samples:
                    if isinstance(sample, StorageError):
                        errors.handle(sample, sample.uri)
                        continue
                    try:
                        item: Item_co = apply_transform(sample, self._transform)
                    except Exception as exc:
                        errors.handle(exc, sample.uri)
                        continue
                    yield item
        finally:
            counters.update_retries(self._source.num_retries)

    def _prefetched(self, listing_indices: Sequence[int]) -> Samples:
        prefetcher = None
        with suppress(IndexError):
            prefetcher = self._prefetchers.pop()
        if prefetcher is None:
            yield from self._source.read(listing_indices)
            return
        try:
            order = None if self._planner is None else self._planner.order
            yield from prefetcher.read(
                list(listing_indices), len(self._source), self._source.read, order
            )
        finally:
            self._prefetchers.append(prefetcher)

    def _listing_index(self, index: SupportsIndex) -> int:
        listing_index, length = as_index(index), len(self._source)
        if not -length <= listing_index < length:
            raise IndexError(f"index {listing_index} is out of range for {self!r}")
        return listing_index % length
