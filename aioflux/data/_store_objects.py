"""Section: the objects of one store, and the ways to read them: requests, composites, a cache.

A cache is asked in the order of reading. What it has not is fetched ahead, and to know that ahead,
names are looked for before their turn:

    wanted -> looked ahead: here, or asked for --> fetched, ahead of the consumer --+
                            |                                                       v
                            +--> in turn: from the cache ---------------------> consumer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import quote_path
from aioflux.data._composites import read_batches
from aioflux.data._counters import Meter
from aioflux.data._sample import Sample
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux import sync
    from aioflux._values.listing import KeyColumn, Listing
    from aioflux.data._cache.cache import Cache
    from aioflux.data._composites import Compose

__all__ = ["Access", "Section"]

T = TypeVar("T")
Wanted: TypeAlias = Iterator[tuple[int, ObjectMeta | str]]
Samples: TypeAlias = Generator[tuple[int, Sample | StorageError], None, None]
"""Indices, each with the sample, or with the reason why there is none."""

_MAX_LOOKED_AHEAD: Final = 4096
"""Objects that are looked for in the cache ahead of their turn: between two that are not there may
lie a million that are."""


@dataclass(frozen=True)
class Access:
    """How objects are read."""

    compose: Compose = "off"
    """Whether small objects are composed on the service, and read at once."""
    max_composite_bytes: int = 100_000_000
    """Bytes of one composite, at most."""
    cache: Cache | None = None
    """Where objects are kept between epochs."""
    meter: Meter = field(default_factory=Meter)
    """Counts what is read."""


@dataclass(frozen=True)
class Section:
    """Objects of one store; positions count through all sections of a dataset."""

    start: int
    """Position of the first."""
    items: Listing | KeyColumn
    """What they are."""
    store: sync.Store
    """Where they are."""
    access: Access
    """How they are read."""

    def item(self, position: int) -> ObjectMeta | str:
        """Return what is known of an object: metadata, or its name."""
        return self.items[position - self.start]

    def read(self, pairs: Iterable[tuple[int, int]], *, is_ordered: bool) -> Samples:
        """Read `(index, position)` pairs, and give the index with each sample."""
        wanted = ((index, self.item(position)) for index, position in pairs)
        return self.read_items(wanted, is_ordered=is_ordered)

    def read_items(self, wanted: Wanted, *, is_ordered: bool) -> Samples:
        """Read `(index, item)` pairs of the store, and give the index with each sample."""
        if self.access.cache is not None:
            return self._cached(wanted, self.access.cache)
        return self._in_order(wanted) if is_ordered else self._as_they_arrive(wanted)

    def _batches(
        self, items: Iterable[ObjectMeta | str]
    ) -> Generator[tuple[ObjectMeta | None, bytes | StorageError], None, None]:
        access = self.access
        batches = read_batches(
            self.store,
            items,
            compose=access.compose,
            max_composite_bytes=access.max_composite_bytes,
        )
        with _closing(batches):
            for batch in batches:
                yield from batch

    def _in_order(self, wanted: Wanted) -> Samples:
        asked: deque[int] = deque()

        def items() -> Iterator[ObjectMeta | str]:
            for index, item in wanted:
                asked.append(index)
                yield item

        meter = self.access.meter
        with closing(self._batches(items())) as stream:
            for meta, data in stream:
                yield asked.popleft(), _sample(meta, data, meter)

    def _as_they_arrive(self, wanted: Wanted) -> Samples:
        asked: dict[str, deque[int]] = {}
        base = self.store.uri.rstrip("/") + "/"

        def items() -> Iterator[ObjectMeta | str]:
            for index, item in wanted:
                key = item if isinstance(item, str) else item.key
                asked.setdefault(key, deque()).append(index)
                yield item

        meter = self.access.meter
        batches = self.store.fetch_batches(items(), ordered=False, return_exceptions=True)
        with _closing(batches):
            for batch in batches:
                for meta, data in batch:
                    key = _failed(data, base, asked) if meta is None else meta.key
                    indices = asked[key]
                    index = indices.popleft()
                    if not indices:
                        del asked[key]
                    yield index, _sample(meta, data, meter)

    def _cached(self, wanted: Wanted, cache: Cache) -> Samples:
        ahead, meter = _Ahead(wanted, cache, self._in_order), self.access.meter
        with closing(ahead):
            while (turn := ahead.next_turn()) is not None:
                index, meta, sample = turn
                if sample is None:
                    data = cache.get(meta)
                    if data is not None:
                        meter.count(1, len(data), num_cache_hits=1)
                        yield index, Sample(meta.key, data, meta)
                        continue
                    # Evicted or damaged since it was looked for.
                    sample = self._read(meta)
                if isinstance(sample, Sample):
                    cache.put(meta, sample.data)
                yield index, sample

    def _read(self, meta: ObjectMeta) -> Sample | StorageError:
        try:
            return _sample(meta, self.store.get(meta), self.access.meter)
        except StorageError as exc:
            return exc


class _Ahead:
    """What comes next, where some objects are in the cache and others are fetched ahead."""

    def __init__(self, wanted: Wanted, cache: Cache, fetch: Callable[[Wanted], Samples]) -> None:
        self._wanted = wanted
        self._cache = cache
        self._fetch = fetch
        self._turns: deque[tuple[int, ObjectMeta, bool]] = deque()
        self._stream: Samples | None = None
        self._fetched: deque[Sample | StorageError] = deque()

    def close(self) -> None:
        """End what is under way."""
        if self._stream is not None:
            self._stream.close()

    def next_turn(self) -> tuple[int, ObjectMeta, Sample | StorageError | None] | None:
        """Return the next one, without a sample where it is in the cache; None behind the last."""
        while not self._turns:
            if self._stream is None and not self._look():
                return None
            if self._stream is not None and not self._turns:
                self._wait()
        index, meta, is_here = self._turns.popleft()
        if is_here:
            return index, meta, None
        if not self._fetched:
            self._wait()
        return index, meta, self._fetched.popleft()

    def _wait(self) -> None:
        """Wait for an object that is fetched; looks ahead meanwhile."""
        assert self._stream is not None
        fetched = next(self._stream, None)
        if fetched is None:
            self._stream = None
        else:
            self._fetched.append(fetched[1])

    def _look(self) -> bool:
        """Look at the next one, and begin to fetch where it is not here; tell whether there is."""
        for index, item in self._wanted:
            assert isinstance(item, ObjectMeta)
            if self._cache.has(item):
                self._turns.append((index, item, True))
            else:
                self._stream = self._fetch(self._missing(chain([(index, item)], self._wanted)))
            return True
        return False

    def _missing(self, wanted: Wanted) -> Wanted:
        """Yield what is not in the cache, and note whose turn is when."""
        for index, item in wanted:
            assert isinstance(item, ObjectMeta)
            is_here = self._cache.has(item)
            self._turns.append((index, item, is_here))
            if not is_here:
                yield index, item
            elif len(self._turns) > _MAX_LOOKED_AHEAD:
                return


def _sample(
    meta: ObjectMeta | None, data: bytes | StorageError, meter: Meter
) -> Sample | StorageError:
    if isinstance(data, StorageError):
        return data
    assert meta is not None
    meter.count(1, len(data))
    return Sample(meta.key, data, meta)


def _failed(error: bytes | StorageError, base: str, keys: Iterable[str]) -> str:
    """Return which key an error is of."""
    assert isinstance(error, StorageError)
    for key in keys:
        if error.uri in {base + key, base + quote_path(key)}:
            return key
    raise error


@contextmanager
def _closing(batches: Iterator[T]) -> Iterator[Iterator[T]]:
    """Close what the blocking face of a store iterates with: all of these are generators."""
    try:
        yield batches
    finally:
        if isinstance(batches, Generator):
            batches.close()
