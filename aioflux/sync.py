"""Blocking stores: the methods of `aioflux.Store` without `await`.

    store = aioflux.sync.open_store("gs://bucket/train")
    for meta in store.list(): ...

Every call runs on one background event loop, which all stores of the process share, and crosses to
it once a call, page or batch. Arguments, results and errors are those of the asynchronous method.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from aioflux import _bridge
from aioflux import store as _store
from aioflux._transfer.range_plan import MAX_GAP_BYTES

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from aioflux._values.listing import Listing
    from aioflux._values.meta import CleanResult, DeleteResult, ObjectMeta
    from aioflux._values.stats import ProgressHook, StoreStats
    from aioflux.options import RetryPolicy, Timeouts, TransferOptions
    from aioflux.store import Buffer, DataBatch, MetaBatch, RangesData, TriedBatch, WriteMode

__all__ = ["ObjectReader", "ObjectWriter", "Store", "open_store"]


def open_store(
    uri: str,
    *,
    transfer: TransferOptions | None = None,
    retry: RetryPolicy | None = None,
    timeouts: Timeouts | None = None,
    credentials: Any = None,
    endpoint_url: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    progress: ProgressHook | None = None,
) -> Store:
    """Open the objects below a uri; as `aioflux.open_store`, for blocking callers."""
    return Store(
        _store.open_store(
            uri,
            transfer=transfer,
            retry=retry,
            timeouts=timeouts,
            credentials=credentials,
            endpoint_url=endpoint_url,
            ssl_context=ssl_context,
            progress=progress,
        )
    )


class ObjectReader:
    """An object opened for reading; see `aioflux.store.ObjectReader`."""

    def __init__(self, reader: _bridge.Held[_store.ObjectReader]) -> None:
        self._reader = reader
        self.meta = reader.value.meta

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, or to the end if it is negative."""
        return _bridge.run(self._reader.value.read(size))

    def readinto(self, view: bytearray | memoryview) -> int:
        """Fill `view` and return how many bytes there were."""
        return _bridge.run(self._reader.value.readinto(view))

    def prefetch(self) -> None:
        """Start to read ahead, as much as may be buffered, without waiting."""
        _bridge.run(self._reader.value.prefetch())

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._reader.value.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position, as `io.IOBase.seek`."""
        return self._reader.value.seek(offset, whence)


class ObjectWriter:
    """An object under construction; see `aioflux.store.ObjectWriter`."""

    def __init__(self, writer: _bridge.Held[_store.ObjectWriter]) -> None:
        self._writer = writer
        self._object = writer.value

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the object, once it is visible."""
        return self._object.meta

    def write(self, data: Buffer) -> int:
        """Write the bytes of `data` and return their number."""
        return _bridge.run(self._writer.value.write(data))

    def write_copy(self, data: Buffer) -> int:
        """As `write`; a zero-copy writer copies these bytes."""
        return _bridge.run(self._writer.value.write_copy(data))

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._writer.value.tell()


class Store:
    """Objects below one uri; see `aioflux.Store`."""

    def __init__(self, store: _store.Store) -> None:
        self._store = store
        _bridge.close_when_dropped(store)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store,)

    @property
    def uri(self) -> str:
        """The uri that keys are relative to."""
        return self._store.uri

    @property
    def transfer(self) -> TransferOptions:
        """Limits of requests and bytes in flight."""
        return self._store.transfer

    @property
    def retry(self) -> RetryPolicy:
        """Policy of retries."""
        return self._store.retry

    @property
    def stats(self) -> StoreStats:
        """Requests, retries, bytes and latency of this store so far, in this process."""
        return self._store.stats

    def __repr__(self) -> str:
        return f"<sync {self._store!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the store. Closing twice does nothing."""
        _bridge.run(self._store.aclose())

    def head(self, key: str | ObjectMeta) -> ObjectMeta:
        """Read the metadata of an object."""
        return _bridge.run(self._store.head(key))

    def get(self, key: str | ObjectMeta) -> bytes:
        """Read a whole object and verify it."""
        return _bridge.run(self._store.get(key))

    def get_into(
        self, key: str | ObjectMeta, buffer: bytearray | memoryview, *, start: int = 0
    ) -> int:
        """Read an object straight into memory."""
        return _bridge.run(self._store.get_into(key, buffer, start=start))

    def get_range(self, key: str | ObjectMeta, *, start: int, end: int) -> bytes:
        """Read the bytes `[start, end)` of an object."""
        return _bridge.run(self._store.get_range(key, start=start, end=end))

    def get_ranges(
        self,
        key: str | ObjectMeta,
        ranges: Sequence[tuple[int, int]],
        *,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> RangesData:
        """Read several ranges of an object, near ones together, all of one generation."""
        return _bridge.run(self._store.get_ranges(key, ranges, max_gap_bytes=max_gap_bytes))

    def get_many(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[tuple[str, bytes]]:
        """Yield `(key, data)` of many objects, verified."""
        for batch in self.get_batches(keys, ordered=ordered):
            yield from batch
            del batch

    def get_batches(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[DataBatch]:
        """Yield what `get_many` yields, in lists of the objects that have arrived."""
        fed = _bridge.feed(keys, max_ahead=2 * self.transfer.max_in_flight)
        return _bridge.iterate(self._store.get_batches(fed, ordered=ordered), feed=fed)

    def fetch_batches(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[MetaBatch]:
        """Yield lists of `(meta, data)`."""
        fed = _bridge.feed(keys, max_ahead=2 * self.transfer.max_in_flight)
        return _bridge.iterate(self._store.fetch_batches(fed, ordered=ordered), feed=fed)

    def try_fetch_batches(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[TriedBatch]:
        """Yield lists of `(meta, data)`, or of `(None, error)` for objects that cannot be read."""
        fed = _bridge.feed(keys, max_ahead=2 * self.transfer.max_in_flight)
        return _bridge.iterate(self._store.try_fetch_batches(fed, ordered=ordered), feed=fed)

    def fetch_composed(
        self, metas: Iterable[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> Iterator[MetaBatch]:
        """Yield lists of `(meta, data)`, with fewer requests for small objects."""
        fed = self._feed_for_composites(metas)
        batches = self._store.fetch_composed(fed, max_composite_bytes=max_composite_bytes)
        return _bridge.iterate(batches, feed=fed)

    def try_fetch_composed(
        self, metas: Iterable[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> Iterator[TriedBatch]:
        """As `fetch_composed`, with `(None, error)` for objects that cannot be read."""
        fed = self._feed_for_composites(metas)
        batches = self._store.try_fetch_composed(fed, max_composite_bytes=max_composite_bytes)
        return _bridge.iterate(batches, feed=fed)

    def _feed_for_composites(self, metas: Iterable[ObjectMeta]) -> Any:
        # Each request in flight may be for a composite of 32 objects.
        return _bridge.feed(metas, max_ahead=32 * self.transfer.max_in_flight)

    def list(
        self, prefix: str = "", *, delimiter: str = "", match_glob: str = ""
    ) -> Iterator[ObjectMeta]:
        """Yield the metadata of every object whose key begins with `prefix`, sorted by key."""
        for page in self.list_pages(prefix, delimiter=delimiter, match_glob=match_glob):
            yield from page

    def list_pages(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        page_size: int | None = None,
    ) -> Iterator[Listing]:
        """Yield the pages of `list`, as the service returns them."""
        return _bridge.iterate(
            self._store.list_pages(
                prefix, delimiter=delimiter, match_glob=match_glob, page_size=page_size
            )
        )

    def list_all(self, prefix: str = "", *, delimiter: str = "", match_glob: str = "") -> Listing:
        """Return the listing as one sequence."""
        return _bridge.run(self._store.list_all(prefix, delimiter=delimiter, match_glob=match_glob))

    def save_manifest(self, key: str, prefix: str = "") -> ObjectMeta:
        """List the objects below `prefix`, and store the listing as an object."""
        return _bridge.run(self._store.save_manifest(key, prefix))

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        """Write a whole object: it appears whole or not at all."""
        return _bridge.run(
            self._store.put(
                key,
                data,
                mode=mode,
                if_generation_match=if_generation_match,
                content_type=content_type,
                metadata=metadata,
            )
        )

    def put_many(
        self, pairs: Iterable[tuple[str, Buffer]], *, mode: WriteMode = "overwrite"
    ) -> Iterator[ObjectMeta]:
        """Write many objects and yield the metadata of each as it is stored.

        Nothing is sent until it is iterated, as in `list(store.put_many(pairs))`; if it never is,
        it issues a RuntimeWarning.
        """
        fed = _bridge.feed(pairs, max_ahead=self.transfer.max_in_flight)
        return _bridge.iterate(self._store.put_many(fed, mode=mode), feed=fed)

    @contextmanager
    def open_writer(
        self,
        key: str,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
        zero_copy: bool = False,
    ) -> Iterator[ObjectWriter]:
        """Write an object piece by piece; it becomes visible if the body succeeds."""
        writer = self._store.open_writer(
            key,
            mode=mode,
            if_generation_match=if_generation_match,
            content_type=content_type,
            metadata=metadata,
            zero_copy=zero_copy,
        )
        with _bridge.entered(writer) as held:
            yield ObjectWriter(held)

    @contextmanager
    def open_reader(
        self, key: str | ObjectMeta, *, read_ahead_bytes: int | None = None
    ) -> Iterator[ObjectReader]:
        """Read an object piece by piece, at the generation that it has now."""
        reader = self._store.open_reader(key, read_ahead_bytes=read_ahead_bytes)
        with _bridge.entered(reader) as held:
            yield ObjectReader(held)

    def compose(
        self,
        key: str,
        sources: Sequence[str | ObjectMeta],
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        """Concatenate objects of this store into one, on the service."""
        return _bridge.run(
            self._store.compose(
                key,
                sources,
                mode=mode,
                if_generation_match=if_generation_match,
                content_type=content_type,
                metadata=metadata,
            )
        )

    def copy(
        self, source: str | ObjectMeta, key: str, *, mode: WriteMode = "overwrite"
    ) -> ObjectMeta:
        """Copy an object within the store, on the service."""
        return _bridge.run(self._store.copy(source, key, mode=mode))

    def delete(self, key: str | ObjectMeta) -> None:
        """Delete an object; see `Store.delete` for servers that do not compare generations."""
        _bridge.run(self._store.delete(key))

    def delete_many(self, keys: Iterable[str | ObjectMeta]) -> DeleteResult:
        """Delete many objects, and return the outcome of each; see `Store.delete_many`."""
        return _bridge.run(self._store.delete_many(list(keys)))

    def missing_permissions(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of `names` that the credentials do not have on the bucket."""
        return _bridge.run(self._store.missing_permissions(names))

    def check_conditions(self) -> Sequence[str]:
        """Return the conditions that the server ignores: "create", "replace" and "delete"."""
        return _bridge.run(self._store.check_conditions())

    def clean(
        self, prefix: str = "", *, older_than_seconds: float = 86_400.0, dry_run: bool = False
    ) -> CleanResult:
        """Remove what killed processes left below a prefix, and return what that was."""
        return _bridge.run(
            self._store.clean(prefix, older_than_seconds=older_than_seconds, dry_run=dry_run)
        )
