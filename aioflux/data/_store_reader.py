"""StoreReader: objects of one store as samples, read by requests, by composites or from a cache.

With a cache, the reader looks ahead and prefetches cache misses while it reads cache hits. Samples
keep their order:

    objects -> lookahead -- miss --> requests, prefetched -----------------+
                         |                                                 v
                         +-- hit --> read from the cache at its position --> consumer
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias, cast

from torch.utils.data import get_worker_info

from aioflux import _bridge
from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import quote_path
from aioflux.data._cache.cache import Cache
from aioflux.data._counters import LoadCounters
from aioflux.data._sample import make_sample
from aioflux.errors import PermissionDeniedError, StorageError
from aioflux.options import MIB
from aioflux.store import COMPOSITE_PREFIX

if TYPE_CHECKING:
    from aioflux import sync
    from aioflux.data._sample import Sample
    from aioflux.store import TriedBatch

_log = logging.getLogger("aioflux")

Compose: TypeAlias = Literal["off", "on"]
Wanted: TypeAlias = Iterator[tuple[int, ObjectMeta | str]]
"""Objects to read, by metadata or key. Each has an index, which is yielded with its sample."""
Samples: TypeAlias = Generator[tuple[int, "Sample | StorageError"], None, None]
"""Pairs of an index from `Wanted` and the sample, or the error of an object that cannot be read."""

DEFAULT_CACHE_BYTES: Final = 64 * 1024 * MIB

_COMPOSE_PERMISSIONS: Final = ("storage.objects.create", "storage.objects.delete")
"""Permissions that a composed read needs in addition to the permission to read."""

_MAX_LOOKAHEAD: Final = 4096
"""Maximum number of objects to look ahead for cache misses. At a hit beyond it, `_read_cached`
first yields these objects: there may be a million hits before the next miss."""


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Settings for reading objects."""

    compose: Compose = "off"
    """"on" composes small objects on the service, so that one request reads many."""
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
        if compose not in ("off", "on"):
            raise ValueError(f'compose must be "off" or "on", not {compose!r}')
        if directory is None:
            return cls(compose=compose)
        if not os.fspath(directory):
            raise ValueError('cache="" names no directory; pass None for no cache')
        return cls(compose=compose, cache=Cache(directory, max_bytes=cache_bytes))


def prepare_composing(store: sync.Store, *, older_than_seconds: float = 86_400.0) -> None:
    """Check whether a dataset can compose, and delete the composites of dead processes.

    Args:
        store: Store of the objects. It has open connections afterwards.
        older_than_seconds: Age from which composites are deleted; a day by default. A younger
            composite may belong to a live process.

    Raises:
        PermissionDeniedError: The credentials may not create or delete objects.
        ValueError: The service cannot compose.
    """
    _bridge.limit_wait_for_workers()
    if not store.uri.startswith(("gs://", "memory://")):
        raise ValueError(f'{store.uri} cannot compose objects; use compose="off"')
    if missing := store.missing_permissions(_COMPOSE_PERMISSIONS):
        raise PermissionDeniedError(
            f"objects of {store.uri} cannot be composed: the credentials in use lack "
            f"{' and '.join(missing)} on the bucket; grant these permissions, or use "
            'compose="off"',
            uri=store.uri,
        )
    try:
        cleaned = store.clean(COMPOSITE_PREFIX, older_than_seconds=older_than_seconds)
    except PermissionDeniedError as exc:
        _log.warning("composites of dead processes are not deleted: %s", exc)
        return
    for error in cleaned.errors.values():
        _log.warning("a composite of a dead process could not be deleted: %s", error)


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

        counters = self._config.counters
        if self._config.compose == "off":
            batches = self.store.try_fetch_batches(items())
        else:
            if get_worker_info() is not None:
                _bridge.shut_down_with_worker()
            # The source has checked that all items are metadata.
            batches = self.store.try_fetch_composed(cast("Iterator[ObjectMeta]", items()))
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
