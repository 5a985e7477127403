"""StoreReader: objects of one store as samples, read by requests, by composites or from a cache.

With a cache, the reader looks ahead and prefetches cache misses while it reads cache hits. Samples
keep their order:

    objects -> lookahead -- miss --> requests, prefetched -----------------+
                         |                                                 v
                         +-- hit --> read from the cache at its position --> consumer
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final, Self, TypeAlias, cast

from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import quote_path
from aioflux.data._cache.cache import Cache
from aioflux.data._composed_read import fetch_batches, prepare
from aioflux.data._counters import LoadCounters
from aioflux.data._sample import make_sample
from aioflux.errors import StorageError
from aioflux.options import MIB

if TYPE_CHECKING:
    from aioflux import sync
    from aioflux.data._composed_read import Compose
    from aioflux.data._sample import Sample
    from aioflux.store import TriedBatch

Wanted: TypeAlias = Iterator[tuple[int, ObjectMeta | str]]
"""Objects to read, by metadata or key. Each has an index, which is yielded with its sample."""
Samples: TypeAlias = Generator[tuple[int, "Sample | StorageError"], None, None]
"""Pairs of an index from `Wanted` and the sample, or the error of an object that cannot be read."""

DEFAULT_CACHE_BYTES: Final = 64 * 1024 * MIB

_MAX_LOOKAHEAD: Final = 4096
"""Maximum number of objects to look ahead for cache misses. At a hit beyond it, `_read_cached`
first yields these objects: there may be a million hits before the next miss."""


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Settings for reading objects."""

    compose: Compose = "off"
    """"on" composes small objects on the service, so that one request reads many; see `prepare`."""
    max_composite_bytes: int = 100_000_000
    """Largest size of a composite, in bytes."""
    cache: Cache | None = None
    """Disk cache of whole objects; None for no cache."""
    counters: LoadCounters = field(default_factory=LoadCounters)
    """Counters of the objects and bytes that are read."""

    @classmethod
    def with_cache(
        cls,
        directory: str | os.PathLike[str] | None,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        compose: Compose = "off",
    ) -> Self:
        """Return a config with a cache, or without a cache if `directory` is None."""
        if directory is None:
            return cls(compose=compose)
        if not os.fspath(directory):
            raise ValueError('cache="" names no directory; pass None for no cache')
        return cls(compose=compose, cache=Cache(directory, max_bytes=cache_bytes))

    def prepared_for(self, store: sync.Store) -> Self:
        """Return a copy whose `compose` is the result of `prepare` for this store."""
        return replace(self, compose=prepare(store, self.compose))


class StoreReader:
    """Reader of samples from one store."""

    def __init__(self, store: sync.Store, config: FetchConfig) -> None:
        self.store = store
        self._config = config

    def read(self, wanted: Wanted, *, is_ordered: bool = True) -> Samples:
        """Yield samples in order; if `is_ordered` is False, as they arrive.

        With a cache, samples are always yielded in order.
        """
        if self._config.cache is not None:
            return self._read_cached(wanted, self._config.cache)
        return self._read_in_order(wanted) if is_ordered else self._read_as_they_arrive(wanted)

    def read_batch(self, items: Sequence[ObjectMeta | str]) -> list[Sample | StorageError]:
        """Return the samples of objects, in order, or their errors."""
        config, counters = self._config, self._config.counters
        if config.cache is not None or config.compose != "off":
            return [sample for _, sample in self.read(enumerate(items))]
        since = time.monotonic()
        batch = self.store.try_fetch_all(items)
        samples: list[Sample | StorageError] = []
        num_bytes = num_errors = 0
        for meta, data in batch:
            if isinstance(data, StorageError):
                num_errors += 1
                samples.append(data)
            else:
                assert meta is not None
                num_bytes += len(data)
                samples.append(make_sample(meta, data))
        counters.count(len(samples) - num_errors, num_bytes, waited_since=since)
        return samples

    def _read_in_order(self, wanted: Wanted) -> Samples:
        requested: deque[int] = deque()

        def items() -> Iterator[ObjectMeta | str]:
            for index, item in wanted:
                requested.append(index)
                yield item

        config, counters = self._config, self._config.counters
        if config.compose == "off":
            batches = self.store.try_fetch_batches(items())
        else:
            batches = fetch_batches(
                self.store,
                items(),
                compose=config.compose,
                max_composite_bytes=config.max_composite_bytes,
            )
        with closing(cast("Generator[TriedBatch, None, None]", batches)):
            since = time.monotonic()
            for batch in batches:
                counters.count_wait(since)
                for meta, data in batch:
                    yield requested.popleft(), _counted_sample(meta, data, counters)
                since = time.monotonic()
            counters.count_wait(since)

    def _read_as_they_arrive(self, wanted: Wanted) -> Samples:
        requested: dict[str, deque[int]] = {}
        base = self.store.uri.rstrip("/") + "/"

        def items() -> Iterator[ObjectMeta | str]:
            for index, item in wanted:
                key = item if isinstance(item, str) else item.key
                requested.setdefault(key, deque()).append(index)
                yield item

        counters = self._config.counters
        batches = self.store.try_fetch_batches(items(), ordered=False)
        with closing(cast("Generator[TriedBatch, None, None]", batches)):
            since = time.monotonic()
            for batch in batches:
                counters.count_wait(since)
                for meta, data in batch:
                    key = _key_of_error(data, base, requested) if meta is None else meta.key
                    indices = requested[key]
                    index = indices.popleft()
                    if not indices:
                        del requested[key]
                    yield index, _counted_sample(meta, data, counters)
                since = time.monotonic()
            counters.count_wait(since)

    def _read_cached(self, wanted: Wanted, cache: Cache) -> Samples:
        """Read hits from the cache and prefetch misses; yield samples in order."""
        upcoming: deque[tuple[int, ObjectMeta, bool]] = deque()

        def misses(following: Wanted) -> Wanted:
            for index, item in following:
                assert isinstance(item, ObjectMeta)
                is_cached = cache.has(item)
                upcoming.append((index, item, is_cached))
                if not is_cached:
                    yield index, item
                elif len(upcoming) > _MAX_LOOKAHEAD:
                    return

        def hits() -> Samples:
            while upcoming and upcoming[0][2]:
                index, meta, _ = upcoming.popleft()
                yield index, self._read_hit(meta, cache)

        for index, item in wanted:
            assert isinstance(item, ObjectMeta)
            if cache.has(item):
                yield index, self._read_hit(item, cache)
                continue
            following = chain([(index, item)], wanted)
            with closing(self._read_in_order(misses(following))) as fetched:
                for _, sample in fetched:
                    yield from hits()  # hits before this miss
                    missing_index, meta, _ = upcoming.popleft()
                    if not isinstance(sample, StorageError):
                        cache.put(meta, sample.data)
                    yield missing_index, sample
                    yield from hits()  # hits after this miss, without waiting for the next miss
            yield from hits()

    def _read_hit(self, meta: ObjectMeta, cache: Cache) -> Sample | StorageError:
        counters = self._config.counters
        since = time.monotonic()
        data = cache.get(meta)
        counters.count_wait(since)
        if data is not None:
            counters.count(1, len(data), num_cache_hits=1)
            return make_sample(meta, data)
        try:  # the entry was evicted after the lookahead, or is damaged
            data = self.store.get(meta)
        except StorageError as exc:
            return exc
        counters.count(1, len(data))
        cache.put(meta, data)
        return make_sample(meta, data)


def _counted_sample(
    meta: ObjectMeta | None, data: bytes | StorageError, counters: LoadCounters
) -> Sample | StorageError:
    if isinstance(data, StorageError):
        return data
    assert meta is not None
    counters.count(1, len(data))
    return make_sample(meta, data)


def _key_of_error(error: bytes | StorageError, base: str, keys: Iterable[str]) -> str:
    """Return the key of the object whose read failed, or raise the error if no key fits."""
    assert isinstance(error, StorageError)
    for key in keys:
        if error.uri in {base + key, base + quote_path(key)}:
            return key
    raise error
