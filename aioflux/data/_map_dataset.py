"""MapDataset: a map-style dataset of objects."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Never, SupportsIndex, TypeAlias, Unpack, cast

from torch.utils.data import Dataset, get_worker_info

from aioflux.data._batch_prefetch import BatchPrefetcher
from aioflux.data._error_policy import ErrorPolicy, worker_errors
from aioflux.data._job_listing import Sharing
from aioflux.data._options import DATASET_TRANSFER, unknown_option_error
from aioflux.data._sample import Item, Item_co
from aioflux.data._source import from_keys, from_manifests, open_source
from aioflux.data._store_reader import DEFAULT_CACHE_BYTES, FetchConfig
from aioflux.data._transform import (
    check_pickles,
    num_sample_bytes,
    outcomes,
    transform_sample,
)

if TYPE_CHECKING:
    import os
    import ssl

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._counters import LoadStats
    from aioflux.data._epoch import EpochPlanner
    from aioflux.data._error_policy import OnError
    from aioflux.data._options import MapOptions
    from aioflux.data._sample import Sample
    from aioflux.data._source import Lister
    from aioflux.data._store_reader import Compose, Samples
    from aioflux.data._transform import TransformThreads
    from aioflux.errors import StorageError
    from aioflux.options import RetryPolicy, Timeouts, TransferOptions

    _Result: TypeAlias = tuple[tuple[int, Sample | StorageError], Callable[[], Any]]
    """A sample with its index, and a function that returns its item or raises its error."""


class MapDataset(Dataset[Item_co]):
    """The objects below a uri as a dataset with a length and indices, sorted by key.

    The objects are listed once, in the constructor. Reads are pinned to the listed generations: an
    object that was deleted or replaced after the listing raises NotFoundError with its uri, also
    through DataLoader.

    The objects of a batch are read in parallel. DataLoader workers also prefetch the next batches,
    within the limits of `TransferOptions`, if these batches are predictable: without a shuffle, or
    with an `ObjectSampler`, as in `loader`. Objects are not prefetched if only their keys are
    known. A loader with `num_threads` knows the order, and always prefetches.

    Objects of size 0 whose key ends with "/" are left out: web consoles create them to show empty
    directories.

    Without a transform the items are `Sample`, which the default `collate_fn` of DataLoader
    rejects. Pass a transform that returns tensors, numbers, strings or tuples, or
    `collate_fn=list` for batches that are lists of samples. Spawn and forkserver workers need a
    transform that can be pickled, such as a function at the top of a module.
    """

    def __init__(
        self,
        uri: str | Sequence[str] | Lister,
        *,
        transform: Callable[[Sample], Item_co] | None = None,
        on_error: OnError = "raise",
        compose: Compose = "off",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        share_listing: bool | str = True,
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
            uri: As in `aioflux.open_store`; keys are relative to it. With several uris, objects
                are in the order of the uris, and limits apply to each uri separately.
            transform: Called with each `Sample`, in the process that reads it; returns the item.
            on_error: "skip" logs objects that cannot be read or transformed, counts them in
                `stats.num_skipped` and leaves them out of their batch. A function is called with
                the error and the uri, and may also raise. If no object of a batch is left, the last
                error is raised.
            compose: "on" composes small objects on the service and reads each composite by one
                request. Faster only at a high latency, for objects of about 10 kB.
            cache: Local directory that stores objects for later epochs and runs; cached objects are
                not requested again.
            cache_bytes: Largest size of the cache in bytes; 64 GiB by default.
            share_listing: Whether one rank of a process group lists for all ranks. A uri also means
                yes: large listings are handed over by a temporary object below it.
            transfer: As in `aioflux.open_store`, but with 256 requests in flight by default.
                Limits apply to each DataLoader worker separately.
            retry: As in `aioflux.open_store`.
            timeouts: As in `aioflux.open_store`.
            credentials: As in `aioflux.open_store`.
            endpoint_url: As in `aioflux.open_store`.
            ssl_context: As in `aioflux.open_store`.
            unknown: Not accepted: raises TypeError; for options of order and shares, the error
                names the call that accepts them.

        Raises:
            NotFoundError: There is no object below `uri`.
            TransientError: The rank that lists for all ranks did not finish in time.
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
                "transfer": transfer or DATASET_TRANSFER,
                "retry": retry,
                "timeouts": timeouts,
                "credentials": credentials,
                "endpoint_url": endpoint_url,
                "ssl_context": ssl_context,
            },
            config,
            Sharing(share_listing, is_same_on_all_ranks=False),
        )
        self._planner: EpochPlanner | None = None
        """Planner of the last `ObjectSampler` that was built for this dataset."""
        # `_prefetched` removes the prefetcher while using it, because a transform or another thread
        # may read from the dataset at the same time; such reads are not prefetched.
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
        """Build a dataset of the given objects, in the given order, without a listing.

        Args:
            uri: Prefix that the keys are relative to.
            keys: Keys, whose newest generations are read; or metadata of a listing, which pins
                generations.
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

        Reads the manifest, and lists no objects. Every process and run has the same objects.

        Args:
            uri: Uri of one manifest, or of several.
            transform: As for the class.
            options: As for the class.

        Raises:
            NotFoundError: The manifest does not exist, or contains no objects.
            ValueError: The object is not a manifest, or is damaged.
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
        """Return whether items are results of a transform, and not samples."""
        return self._transform is not None

    @property
    def stats(self) -> LoadStats:
        """Counts and times of all reads so far, in this process and its workers."""
        return self._counters.snapshot()

    @property
    def epoch_stats(self) -> LoadStats:
        """Counts and times since the start of this epoch."""
        return self._counters.epoch_snapshot()

    def __getitem__(self, index: SupportsIndex) -> Item_co:
        """Read the object at `index`; a negative index counts from the end.

        Raises:
            IndexError: The index is out of range.
            TypeError: The index is not an integer, such as a slice.
        """
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Item_co]:
        """Read the objects at `indices` in parallel, for a batch of DataLoader.

        Raises:
            StorageError: An object cannot be read; if `on_error` is not "raise", only if no object
                of the batch is left.
        """
        positions = range(len(self._source))  # converts a negative index, and raises IndexError
        try:
            listing_indices = [positions[index] for index in indices]
        except IndexError:
            message = f"an index of {list(indices)!r} is out of range for {self!r}"
            raise IndexError(message) from None
        if self._is_prefetched or self._is_large(listing_indices):
            with closing(self._results(listing_indices)) as results:
                return self._batch(results)
        counters = self._counters.start_clock()
        try:
            samples = self._source.read_batch(listing_indices)
            transform = partial(transform_sample, self._transform)
            return self._batch([(each, partial(transform, each)) for each in enumerate(samples)])
        finally:
            counters.update_retries(self._source.num_retries)

    @property
    def _is_prefetched(self) -> bool:
        # Prefetch only in workers: prefetched objects that are never read stay in memory until the
        # process exits. Prefetch only pinned objects: others could change before they are yielded.
        return get_worker_info() is not None and self._source.has_metadata

    def _is_large(self, listing_indices: Sequence[int]) -> bool:
        """Return whether to transform objects while others are read, since all need much memory."""
        if len(listing_indices) == 1:
            return False
        if not self._source.has_metadata:  # of unknown sizes
            return True
        num_bytes = sum(self._source.sizes(listing_indices))
        return num_bytes > self._source.transfer.max_in_flight_bytes

    def __iter__(self) -> Iterator[Item_co]:
        """Read all objects in order, with prefetching.

        Without this method, Python would call `__getitem__` with 0, 1, 2, ... until an IndexError,
        and so take an IndexError of a transform for the end.

        Raises:
            StorageError: An object cannot be read, and `on_error` is "raise".
        """
        self._counters.start_epoch()
        with closing(self._results(range(len(self)))) as results:
            yield from self._items(results)

    def _batch(self, results: Iterable[_Result]) -> list[Item_co]:
        """Return the items of a batch; raise the last error if no object is left."""
        last_skipped: deque[Exception] = deque(maxlen=1)
        with worker_errors():
            items = list(self._items(results, last_skipped))
            if not items and last_skipped:
                raise last_skipped.pop()
        last_skipped.clear()  # the traceback of an error refers to the deque
        return items

    def _items(
        self, results: Iterable[_Result], last_skipped: deque[Exception] | None = None
    ) -> Iterator[Item_co]:
        for (_, sample), result in results:
            try:
                item: Item_co = result()
            except Exception as exc:
                self._errors.handle(exc, sample.uri)
                if last_skipped is not None:
                    last_skipped.append(exc)
                continue
            yield item

    def _results(
        self, listing_indices: Sequence[int], threads: TransformThreads | None = None
    ) -> Generator[_Result, None, None]:
        """Yield the samples, with functions that return their items or raise errors."""
        counters = self._counters.start_clock()
        read = self._prefetched if self._is_prefetched else self._source.read
        try:
            # Close the generator: the traceback of an error would keep it and its requests alive.
            with closing(read(listing_indices)) as samples:
                transform = partial(transform_sample, self._transform)
                yield from outcomes(samples, transform, threads, num_bytes=num_sample_bytes)
        finally:
            counters.update_retries(self._source.num_retries)

    def _read_batches(
        self, threads: TransformThreads | None, listing_indices: Sequence[int], batch_size: int
    ) -> Iterator[list[Item_co]]:
        """Yield batches of items, prefetched in order."""
        with closing(self._results(listing_indices, threads)) as results:
            for start in range(0, len(listing_indices), batch_size):
                size = min(batch_size, len(listing_indices) - start)
                self._counters.update_retries(self._source.num_retries)
                yield self._batch(islice(results, size))

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
