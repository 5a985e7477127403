"""UrlPrefetcher: objects opened in the order of their urls, and prefetched.

urls -> lookahead -+-> small, or of unknown size: whole, through the queue of their bucket
                   +-> large: as a stream, whose first ranges arrive while the object before it
                       is read
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from aioflux.compat.s3_datapipes._lister import ListedUrl
from aioflux.data._object_stream import open_stream
from aioflux.data._store_reader import StoreReader
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from aioflux import sync
    from aioflux._values.meta import ObjectMeta
    from aioflux.compat.s3_datapipes._options import Stores
    from aioflux.data._object_stream import ObjectStream
    from aioflux.data._store_reader import FetchConfig, Samples

__all__ = ["UrlPrefetcher"]

_MAX_LOOKAHEAD: Final = 4096
"""Urls taken in advance: many of other buckets may lie between two of one bucket."""


@dataclass(eq=False)
class _Upcoming:
    url: str
    queue: _BucketQueue
    large: ObjectMeta | None
    """Metadata of an object that is streamed; None for one that is read whole."""
    stream: ObjectStream | None = None
    """The stream, once it is prefetched."""


class _BucketQueue:
    """Whole reads of one bucket, in the order of their urls."""

    def __init__(
        self, store: sync.Store, config: FetchConfig, take_url: Callable[[], bool]
    ) -> None:
        self.store = store
        self.waiting: deque[ObjectMeta | str] = deque()
        self._reader = StoreReader(store, config)
        self._take_url = take_url
        self._samples: Samples | None = None

    def next_data(self) -> bytes:
        """Return the bytes of the next object."""
        found = None
        while found is None:
            if self._samples is None:
                self._samples = self._reader.read(self._wanted())
            found = next(self._samples, None)
            if found is None:  # too many urls of other buckets lay between
                self._samples = None
        if isinstance(found[1], StorageError):
            raise found[1]
        return found[1].data

    def _wanted(self) -> Iterator[tuple[int, ObjectMeta | str]]:
        while self.waiting or self._take_url():
            if self.waiting:
                yield 0, self.waiting.popleft()

    def close(self) -> None:
        """End the reads in flight."""
        if self._samples is not None:
            self._samples.close()


class UrlPrefetcher:
    """One pass over urls.

    Not `BatchPrefetcher` of the datasets: that one predicts indices of one listing, this one reads
    urls of any buckets that it is given, in parallel, and mixes whole reads with streams.

    Args:
        urls: Urls of objects; taken in the thread that reads.
        stores: Stores of their buckets.
        config: Settings by which whole objects are read.
        buffer_bytes: Larger objects are streamed, with so much prefetched.
    """

    def __init__(
        self, urls: Iterator[str], stores: Stores, config: FetchConfig, buffer_bytes: int
    ) -> None:
        self._urls = urls
        self._stores = stores
        self._config = config
        self._buffer_bytes = buffer_bytes
        self._upcoming: deque[_Upcoming] = deque()
        self._queues: dict[sync.Store, _BucketQueue] = {}
        self._is_over = False
        self._failure: Exception | None = None

    def files(self) -> Generator[tuple[str, BinaryIO], None, None]:
        """Yield each url with the object as a binary file, seekable."""
        try:
            while self._upcoming or self._take_url():
                current = self._upcoming.popleft()
                file = self._open(current)
                self._prefetch_next()
                yield current.url, file
            if self._failure is not None:
                raise self._failure
        finally:
            self._close()

    def _open(self, upcoming: _Upcoming) -> BinaryIO:
        if upcoming.large is None:
            return io.BytesIO(upcoming.queue.next_data())
        return upcoming.stream or self._stream(upcoming.queue.store, upcoming.large)

    def _stream(self, store: sync.Store, meta: ObjectMeta) -> ObjectStream:
        if meta.crc32c is None and store.transfer.verify:
            # Listings of S3 have no checksums: without one, the end of a stream is not verified.
            meta = store.head(meta)
        return open_stream(store, meta, prefetch_bytes=self._buffer_bytes)

    def _prefetch_next(self) -> None:
        """Prefetch the next object if it is a stream; queues prefetch by themselves."""
        if not (self._upcoming or self._take_url()):
            return
        upcoming = self._upcoming[0]
        if upcoming.large is not None and upcoming.stream is None:
            upcoming.stream = self._stream(upcoming.queue.store, upcoming.large)
            upcoming.stream.prefetch()

    def _take_url(self) -> bool:
        """Take one more url, and return whether the limit and the urls allowed it."""
        if self._is_over or len(self._upcoming) >= _MAX_LOOKAHEAD:
            return False
        try:
            url = next(self._urls)
        except StopIteration:
            self._is_over = True
            return False
        except Exception as exc:  # the caller's own: raised after all objects before it
            self._is_over, self._failure = True, exc
            return False
        try:
            self._add(url)
        except (TypeError, ValueError) as exc:
            self._is_over, self._failure = True, exc
            return False
        return True

    def _add(self, url: str) -> None:
        store, key = self._stores.at(url)
        queue = self._queues.get(store)
        if queue is None:
            queue = self._queues[store] = _BucketQueue(store, self._config, self._take_url)
        meta = url.meta if isinstance(url, ListedUrl) else None
        is_cached = self._config.cache is not None
        if meta is None and is_cached:
            raise ValueError(
                f"{url} cannot be kept in a cache by its name alone; use urls as "
                "list_files_by_s3() yields them, or leave cache= out"
            )
        is_large = meta is not None and meta.size > self._buffer_bytes and not is_cached
        self._upcoming.append(_Upcoming(url, queue, meta if is_large else None))
        if not is_large:
            queue.waiting.append(meta or key)

    def _close(self) -> None:
        for upcoming in self._upcoming:
            if upcoming.stream is not None:
                upcoming.stream.abort()
        for queue in self._queues.values():
            queue.close()
