"""Blocking stores: the methods of `aioflux.Store` without `await`.

    store = aioflux.sync.open_store("gs://bucket/train")
    for meta in store.list(): ...

Each method has the arguments, results and errors of the asynchronous method of the same name, whose
docstring is the reference. All blocking stores of a process share one event loop in a background
thread. Each call, page or batch crosses once to this thread, in 35-125 us. Ctrl-C cancels the
running operation. A store may be used from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack

from aioflux import _bridge
from aioflux import store as _store
from aioflux._transfer.read_plan import MAX_GAP_BYTES

if TYPE_CHECKING:
    import ssl
    from os import PathLike

    from aioflux._values.listing import Listing
    from aioflux._values.meta import CleanResult, DeleteResult, ObjectMeta
    from aioflux._values.stats import ProgressHook, StoreStats
    from aioflux.options import RetryPolicy, Timeouts, TransferOptions, WriteAttributes
    from aioflux.store import (
        Buffer,
        DataBatch,
        MetaBatch,
        RangesData,
        TriedBatch,
        UrlMethod,
        WriteMode,
    )

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
    """Open a blocking store of the objects below a uri; see `aioflux.open_store`."""
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

    def __init__(self, reader: _bridge.OpenContext[_store.ObjectReader]) -> None:
        self._reader = reader
        self.meta = reader.value.meta

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes; all remaining bytes if `size` is negative. Empty at the end."""
        return _bridge.run(self._reader.value.read(size))

    def readinto(self, view: bytearray | memoryview) -> int:
        """Read into `view`, and return the number of bytes; 0 at the end of the object."""
        return _bridge.run(self._reader.value.readinto(view))

    def prefetch(self) -> None:
        """Start to prefetch ranges from the current position, without waiting for them."""
        _bridge.run(self._reader.value.prefetch())

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._reader.value.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position, as `io.IOBase.seek`, and return it."""
        return self._reader.value.seek(offset, whence)


class ObjectWriter:
    """An object opened for writing; see `aioflux.store.ObjectWriter`."""

    def __init__(self, writer: _bridge.OpenContext[_store.ObjectWriter]) -> None:
        self._writer = writer
        self._object = writer.value

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the object; available after the `with` block of the writer."""
        return self._object.meta

    def write(self, data: Buffer) -> int:
        """Write the bytes of `data` and return their number."""
        return _bridge.run(self._writer.value.write(data))

    def write_copy(self, data: Buffer) -> int:
        """Write the bytes of `data`, and copy them even if the writer has `zero_copy`."""
        return _bridge.run(self._writer.value.write_copy(data))

    def tell(self) -> int:
        """Return the number of bytes written."""
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
        """Options of transfers."""
        return self._store.transfer

    @property
    def retry(self) -> RetryPolicy:
        """Policy of retries."""
        return self._store.retry

    @property
    def stats(self) -> StoreStats:
        """Counters of this store in this process: requests, retries, bytes and latency."""
        return self._store.stats

    def __repr__(self) -> str:
        return f"<sync {self._store!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store and its connections. A second call has no effect."""
        _bridge.run(self._store.aclose())

    def head(self, key: str | ObjectMeta, *, generation: str | None = None) -> ObjectMeta:
        """Read the metadata of an object."""
        return _bridge.run(self._store.head(key, generation=generation))

    def exists(self, key: str | ObjectMeta) -> bool:
        """Return whether an object has this key, or with metadata, this generation."""
        return _bridge.run(self._store.exists(key))

    def get(self, key: str | ObjectMeta, *, generation: str | None = None) -> bytes:
        """Read a whole object, and verify its crc32c."""
        return _bridge.run(self._store.get(key, generation=generation))

    def get_into(
        self, key: str | ObjectMeta, buffer: bytearray | memoryview, *, start: int = 0
    ) -> int:
        """Read an object into memory of the caller, and return the number of bytes read."""
        return _bridge.run(self._store.get_into(key, buffer, start=start))

    def get_range(self, key: str | ObjectMeta, start: int, end: int) -> bytes:
        """Read the bytes `[start, end)` of an object."""
        return _bridge.run(self._store.get_range(key, start=start, end=end))

    def get_ranges(
        self,
        key: str | ObjectMeta,
        ranges: Sequence[tuple[int, int]],
        *,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> RangesData:
        """Read several ranges of one generation of an object."""
        return _bridge.run(self._store.get_ranges(key, ranges, max_gap_bytes=max_gap_bytes))

    def get_many(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[tuple[str, bytes]]:
        """Yield `(key, data)` of many objects, verified and prefetched."""
        return _bridge.flatten(self.get_batches(keys, ordered=ordered))

    def get_batches(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[DataBatch]:
        """Yield lists of `(key, data)` of the objects that have arrived."""
        return self._iterate(self._store.get_batches, keys, ordered=ordered)

    def fetch_batches(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[MetaBatch]:
        """Yield lists of `(meta, data)` of the objects that have arrived."""
        return self._iterate(self._store.fetch_batches, keys, ordered=ordered)

    def try_fetch_batches(
        self, keys: Iterable[str | ObjectMeta], *, ordered: bool = True
    ) -> Iterator[TriedBatch]:
        """Yield lists as `fetch_batches` does, with `(None, error)` for each unreadable object."""
        return self._iterate(self._store.try_fetch_batches, keys, ordered=ordered)

    def try_fetch_all(self, keys: Sequence[str | ObjectMeta]) -> TriedBatch:
        """Return what `try_fetch_batches` yields for all keys, in order, as one list."""
        return _bridge.run(self._store.try_fetch_all(keys))

    def fetch_composed(
        self, metas: Iterable[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> Iterator[MetaBatch]:
        """Yield lists of `(meta, data)`, with fewer requests for small objects."""
        # Each request in flight may be for a composite of up to 32 objects.
        fetch, limit = self._store.fetch_composed, max_composite_bytes
        return self._iterate(fetch, metas, num_ahead=32, max_composite_bytes=limit)

    def try_fetch_composed(
        self, metas: Iterable[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> Iterator[TriedBatch]:
        """Yield lists as `fetch_composed` does, with `(None, error)` for each unreadable object."""
        fetch, limit = self._store.try_fetch_composed, max_composite_bytes
        return self._iterate(fetch, metas, num_ahead=32, max_composite_bytes=limit)

    def _iterate(
        self, call: Any, items: Iterable[Any], *, num_ahead: int = 2, **options: Any
    ) -> Iterator[Any]:
        feed = _bridge.feed(items, max_ahead=num_ahead * self.transfer.max_in_flight)
        return _bridge.iterate(call(feed, **options), feed=feed)

    def list(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        limit: int | None = None,
        versions: bool = False,
    ) -> Iterator[ObjectMeta]:
        """Yield the metadata of every object whose key begins with `prefix`, sorted by key."""
        if versions:
            listed = self._store.list(
                prefix, delimiter=delimiter, match_glob=match_glob, limit=limit, versions=True
            )
            return _bridge.iterate(listed)
        pages = self.list_pages(prefix, delimiter=delimiter, match_glob=match_glob, limit=limit)
        return _bridge.flatten(pages)

    def list_pages(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        page_size: int | None = None,
        limit: int | None = None,
        with_temporary: bool = False,
    ) -> Iterator[Listing]:
        """Yield the objects of `list`, one page at a time."""
        return _bridge.iterate(
            self._store.list_pages(
                prefix,
                delimiter=delimiter,
                match_glob=match_glob,
                page_size=page_size,
                limit=limit,
                with_temporary=with_temporary,
            )
        )

    def list_all(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        limit: int | None = None,
    ) -> Listing:
        """Return the whole listing as one sequence."""
        return _bridge.run(
            self._store.list_all(prefix, delimiter=delimiter, match_glob=match_glob, limit=limit)
        )

    def save_manifest(self, key: str, prefix: str = "") -> ObjectMeta:
        """Store a listing as an object, a manifest, and return the metadata of the manifest."""
        return _bridge.run(self._store.save_manifest(key, prefix))

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        **attributes: Unpack[WriteAttributes],
    ) -> ObjectMeta:
        """Write an object atomically: the whole object becomes visible, or nothing."""
        return _bridge.run(
            self._store.put(
                key,
                data,
                mode=mode,
                if_generation_match=if_generation_match,
                **attributes,
            )
        )

    def put_many(
        self, pairs: Iterable[tuple[str, Buffer]], *, mode: WriteMode = "overwrite"
    ) -> Listing:
        """Write many objects, and return the metadata of all of them, sorted by key."""
        feed = _bridge.feed(pairs, max_ahead=self.transfer.max_in_flight)
        return _bridge.run(self._store.put_many(feed, mode=mode), feed=feed)

    def put_batches(
        self, pairs: Iterable[tuple[str, Buffer]], *, mode: WriteMode = "overwrite"
    ) -> Iterator[Sequence[ObjectMeta]]:
        """Yield lists of the metadata of objects that were stored; nothing before it is iterated.

        A generator of pairs may wait until its earlier objects are stored, but not until they are
        yielded, because one thread runs both iterations.
        """
        return self._iterate(self._store.put_batches, pairs, num_ahead=1, mode=mode)

    def upload_file(
        self,
        path: str | PathLike[str],
        key: str,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        progress: Callable[[int], object] | None = None,
        **attributes: Unpack[WriteAttributes],
    ) -> ObjectMeta:
        """Write an object from a local file; `progress` is called on the background thread."""
        return _bridge.run(
            self._store.upload_file(
                path,
                key,
                mode=mode,
                if_generation_match=if_generation_match,
                progress=progress,
                **attributes,
            )
        )

    def download_file(
        self,
        key: str | ObjectMeta,
        path: str | PathLike[str],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> ObjectMeta:
        """Read an object into a local file; `progress` is called on the background thread."""
        return _bridge.run(self._store.download_file(key, path, progress=progress))

    @contextmanager
    def open_writer(
        self,
        key: str,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        zero_copy: bool = False,
        **attributes: Unpack[WriteAttributes],
    ) -> Iterator[ObjectWriter]:
        """Write an object piece by piece: `with store.open_writer(key) as writer: ...`."""
        writer = self._store.open_writer(
            key,
            mode=mode,
            if_generation_match=if_generation_match,
            zero_copy=zero_copy,
            **attributes,
        )
        with _bridge.entered(writer) as opened:
            yield ObjectWriter(opened)

    @contextmanager
    def open_reader(
        self, key: str | ObjectMeta, *, read_ahead_bytes: int | None = None
    ) -> Iterator[ObjectReader]:
        """Read an object piece by piece: `with store.open_reader(key) as reader: ...`."""
        reader = self._store.open_reader(key, read_ahead_bytes=read_ahead_bytes)
        with _bridge.entered(reader) as opened:
            yield ObjectReader(opened)

    def compose(
        self,
        key: str,
        sources: Sequence[str | ObjectMeta],
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        **attributes: Unpack[WriteAttributes],
    ) -> ObjectMeta:
        """Concatenate objects of this store into one object, on the service."""
        return _bridge.run(
            self._store.compose(
                key,
                sources,
                mode=mode,
                if_generation_match=if_generation_match,
                **attributes,
            )
        )

    def copy(
        self, source: str | ObjectMeta, key: str, *, mode: WriteMode = "overwrite"
    ) -> ObjectMeta:
        """Copy an object within the store, on the service."""
        return _bridge.run(self._store.copy(source, key, mode=mode))

    def move(
        self, source: str | ObjectMeta, key: str, *, mode: WriteMode = "overwrite"
    ) -> ObjectMeta:
        """Rename an object within the store, on the service."""
        return _bridge.run(self._store.move(source, key, mode=mode))

    def delete(self, key: str | ObjectMeta) -> None:
        """Delete an object; with metadata, only the generation in the metadata."""
        _bridge.run(self._store.delete(key))

    def delete_many(self, keys: Iterable[str | ObjectMeta]) -> DeleteResult:
        """Delete many objects, and return the outcome of each."""
        items = keys if isinstance(keys, str | bytes) else list(keys)  # text is rejected
        return _bridge.run(self._store.delete_many(items))

    def missing_permissions(self, names: Sequence[str]) -> Sequence[str]:
        """Return the permissions in `names` that the credentials lack on the bucket, in order."""
        return _bridge.run(self._store.missing_permissions(names))

    def sign(self, key: str, *, method: UrlMethod = "GET", expires: timedelta | float) -> str:
        """Return a url with which anyone can send one kind of request for an object."""
        return _bridge.run(self._store.sign(key, method=method, expires=expires))

    def check_conditions(self) -> Sequence[str]:
        """Return those of "create", "replace" and "delete" that the server ignores."""
        return _bridge.run(self._store.check_conditions())

    def clean(
        self, prefix: str = "", *, older_than_seconds: float = 86_400.0, dry_run: bool = False
    ) -> CleanResult:
        """Remove the uploads and temporary objects of killed processes below a prefix."""
        return _bridge.run(
            self._store.clean(prefix, older_than_seconds=older_than_seconds, dry_run=dry_run)
        )


def num_repeated(store: Store) -> int:
    """Return how many requests were repeated, after a failure or because of wrong bytes."""
    return _store.sessions_of(store._store).num_repeated  # noqa: SLF001  not for users
