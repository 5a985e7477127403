"""Ahead: objects opened in the order of their urls, fetched ahead of who reads them.

urls -> turns, looked ahead -+-> small, or of unknown size: whole, by the lane of their bucket
                             +-> large: as a stream, whose first ranges come while the one
                                 before it is read
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from aioflux._values.listing import Listing
from aioflux.compat.s3_datapipes._urls import ListedUrl
from aioflux.data._object_stream import open_stream
from aioflux.data._store_objects import Access, Section
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from aioflux import sync
    from aioflux._values.meta import ObjectMeta
    from aioflux.compat.s3_datapipes._options import Stores
    from aioflux.data._cache.cache import Cache
    from aioflux.data._object_stream import ObjectStream
    from aioflux.data._store_objects import Samples

__all__ = ["Ahead"]

_MAX_LOOKED_AHEAD: Final = 4096
"""Urls that are looked at ahead of their turn: between two of one bucket may lie many of others."""


@dataclass(eq=False)
class _Turn:
    url: str
    lane: _Lane
    large: ObjectMeta | None
    """What is read as a stream; None for what is read whole."""
    stream: ObjectStream | None = None
    """Where it is under way."""


class _Lane:
    """The whole reads of one bucket, in the order of their urls."""

    def __init__(self, store: sync.Store, cache: Cache | None, look: Callable[[], bool]) -> None:
        self.store = store
        self.waiting: deque[ObjectMeta | str] = deque()
        self._section = Section(0, Listing(), store, Access(cache=cache))
        self._look = look
        self._samples: Samples | None = None

    def next_data(self) -> bytes:
        """Return the bytes of the next one."""
        found = None
        while found is None:
            if self._samples is None:
                self._samples = self._section.read_items(self._wanted(), is_ordered=True)
            found = next(self._samples, None)
            if found is None:  # too many urls of others lay between
                self._samples = None
        if isinstance(found[1], StorageError):
            raise found[1]
        return found[1].data

    def _wanted(self) -> Iterator[tuple[int, ObjectMeta | str]]:
        while self.waiting or self._look():
            if self.waiting:
                yield 0, self.waiting.popleft()

    def close(self) -> None:
        """End what is under way."""
        if self._samples is not None:
            self._samples.close()


class Ahead:
    """One pass over urls.

    Args:
        urls: Of objects; taken in the thread that reads.
        stores: Where they are.
        cache: Where whole objects are kept.
        buffer_bytes: Objects that are known to be larger are streams, of which so much is held.
    """

    def __init__(
        self, urls: Iterator[str], stores: Stores, cache: Cache | None, buffer_bytes: int
    ) -> None:
        self._urls = urls
        self._stores = stores
        self._cache = cache
        self._buffer_bytes = buffer_bytes
        self._turns: deque[_Turn] = deque()
        self._lanes: dict[sync.Store, _Lane] = {}
        self._is_over = False
        self._failure: Exception | None = None

    def files(self) -> Generator[tuple[str, BinaryIO], None, None]:
        """Yield each url with the object as a binary file, seekable."""
        try:
            while self._turns or self._look():
                turn = self._turns.popleft()
                file = self._open(turn)
                self._begin_next()
                yield turn.url, file
            if self._failure is not None:
                raise self._failure
        finally:
            self._close()

    def _open(self, turn: _Turn) -> BinaryIO:
        if turn.large is None:
            return io.BytesIO(turn.lane.next_data())
        return turn.stream or self._stream(turn, turn.large)

    def _stream(self, turn: _Turn, meta: ObjectMeta) -> ObjectStream:
        store = turn.lane.store
        if meta.crc32c is None and store.transfer.verify:
            # Listings of S3 tell no checksums: without one, nobody could compare the stream's end.
            meta = store.head(meta)
        return open_stream(store, meta, read_ahead_bytes=self._buffer_bytes)

    def _begin_next(self) -> None:
        """Have the next one under way where it is a stream; lanes look ahead by themselves."""
        if not (self._turns or self._look()):
            return
        turn = self._turns[0]
        if turn.large is not None and turn.stream is None:
            turn.stream = self._stream(turn, turn.large)
            turn.stream.prefetch()

    def _look(self) -> bool:
        """Take one more url, and tell whether there was one, and room for it."""
        if self._is_over or len(self._turns) >= _MAX_LOOKED_AHEAD:
            return False
        try:
            url = next(self._urls)
        except StopIteration:
            self._is_over = True
            return False
        except Exception as exc:  # the caller's own: raised when all before it are handed out
            self._is_over, self._failure = True, exc
            return False
        try:
            self._take(url)
        except (TypeError, ValueError) as exc:
            self._is_over, self._failure = True, exc
            return False
        return True

    def _take(self, url: str) -> None:
        store, key = self._stores.at(url)
        lane = self._lanes.get(store)
        if lane is None:
            lane = self._lanes[store] = _Lane(store, self._cache, self._look)
        meta = url.meta if isinstance(url, ListedUrl) else None
        if meta is None and self._cache is not None:
            raise ValueError(
                f"{url} cannot be kept in a cache by its name alone; take urls as "
                "list_files_by_s3() yields them, or leave cache= out"
            )
        is_large = meta is not None and meta.size > self._buffer_bytes and self._cache is None
        self._turns.append(_Turn(url, lane, meta if is_large else None))
        if not is_large:
            lane.waiting.append(meta or key)

    def _close(self) -> None:
        for turn in self._turns:
            if turn.stream is not None:
                turn.stream.abandon()
        for lane in self._lanes.values():
            lane.close()
