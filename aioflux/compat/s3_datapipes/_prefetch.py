"""UrlPrefetcher: prefetched objects in the order of their urls.

urls -> lookahead -+-> small or of unknown size: read whole, by the queue of the bucket
                   +-> large: a stream; its first ranges are prefetched while the previous object
                       is read
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from aioflux.compat.s3_datapipes._lister import ListedUrl
from aioflux.data._object_stream import open_stream
from aioflux.data._store_reader import StoreReader
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux import sync
    from aioflux._values.meta import ObjectMeta
    from aioflux.compat.s3_datapipes._options import Stores
    from aioflux.data._object_stream import ObjectStream
    from aioflux.data._store_reader import FetchConfig, Samples

_MAX_LOOKAHEAD: Final = 4096
"""Largest number of urls that are read in advance, to find the next object of one bucket among the
urls of other buckets."""


@dataclass(eq=False)
class _Upcoming:
    url: str
    queue: _BucketQueue
    large: ObjectMeta | None
    """Metadata of an object that is streamed; None for one that is read whole."""
    stream: ObjectStream | None = None
    """The stream of a large object, after its prefetch was started."""


class _BucketQueue:
    """Reads of whole objects of one bucket, in the order of their urls."""

    def __init__(
        self, store: sync.Store, config: FetchConfig, look_ahead: Callable[[], bool]
    ) -> None:
        self.store = store
        self.waiting: deque[ObjectMeta | str] = deque()
        self._reader = StoreReader(store, config)
        self._look_ahead = look_ahead
        self._samples: Samples | None = None

    def next_data(self) -> bytes:
        """Return the bytes of the next object."""
        result = None
        while result is None:
            if self._samples is None:
                self._samples = self._reader.read(self._objects())
            result = next(self._samples, None)
            if result is None:  # the lookahead was full of urls of other buckets
                self._samples = None
        if isinstance(result[1], StorageError):
            raise result[1]
        return result[1].data

    def _objects(self) -> Iterator[tuple[int, ObjectMeta | str]]:
        while self.waiting or self._look_ahead():
            if self.waiting:
                yield 0, self.waiting.popleft()

    def close(self) -> None:
        """Cancel the reads in flight."""
        if self._samples is not None:
            self._samples.close()


class UrlPrefetcher:
    """Prefetched objects of one iteration over urls, which may be in several buckets.

    Args:
        urls: Urls of objects. The iterator runs in the thread of the consumer.
        stores: Stores of the buckets.
        config: Settings for reading whole objects.
        buffer_bytes: Number of bytes above which an object is streamed, and largest number of
            prefetched bytes of a stream.
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
        """Yield each url with its object as a seekable binary file."""
        try:
            while self._upcoming or self._look_ahead():
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
            # A stream is verified by its crc32c, which listings of S3 do not contain.
            meta = store.head(meta)
        return open_stream(store, meta, prefetch_bytes=self._buffer_bytes)

    def _prefetch_next(self) -> None:
        """Start the prefetch of the next object if it is large; a queue prefetches small ones."""
        if not (self._upcoming or self._look_ahead()):
            return
        upcoming = self._upcoming[0]
        if upcoming.large is not None and upcoming.stream is None:
            upcoming.stream = self._stream(upcoming.queue.store, upcoming.large)
            upcoming.stream.prefetch()

    def _look_ahead(self) -> bool:
        """Read one more url; return False at the limit of the lookahead and after the last url."""
        if self._is_over or len(self._upcoming) >= _MAX_LOOKAHEAD:
            return False
        try:
            url = next(self._urls)
        except StopIteration:
            self._is_over = True
            return False
        except Exception as exc:  # an error of the caller's iterator, raised after all objects
            self._is_over, self._failure = True, exc
            return False
        try:
            self._add(url)
        except (TypeError, ValueError) as exc:
            self._is_over, self._failure = True, exc
            return False
        return True

    def _add(self, url: str) -> None:
        store, key = self._stores.locate(url)
        queue = self._queues.get(store)
        if queue is None:
            queue = self._queues[store] = _BucketQueue(store, self._config, self._look_ahead)
        meta = url.meta if isinstance(url, ListedUrl) else None
        is_cached = self._config.cache is not None
        if meta is None and is_cached:
            raise ValueError(
                f"{url} cannot be cached without its metadata; use urls from list_files_by_s3(), "
                "or leave cache= out"
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
