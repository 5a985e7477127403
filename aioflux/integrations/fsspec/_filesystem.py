"""The fsspec filesystem over `Store`.

Over 500 lines: fsspec prescribes one class with these methods. Their plans are in `_paths`
and `_entries`, their transfers in `_transfers`, and the files that `open` returns in `_read_file`
and `_write_file`.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import os
import weakref
from contextlib import aclosing, suppress
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Self

from fsspec import asyn  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from fsspec.callbacks import DEFAULT_CALLBACK  # type: ignore[import-untyped]
from fsspec.compression import compr  # type: ignore[import-untyped]
from fsspec.core import get_compression  # type: ignore[import-untyped]
from fsspec.registry import registry  # type: ignore[import-untyped]
from fsspec.utils import isfilelike, stringify_path  # type: ignore[import-untyped]

from aioflux import _bridge
from aioflux._concurrency.fan_out import gather_bounded
from aioflux._store_cache import StoreCache
from aioflux.errors import AiofluxError, NotFoundError, PermissionDeniedError
from aioflux.integrations.fsspec._async_file import AsyncFile
from aioflux.integrations.fsspec._blocking_methods import add_blocking_methods, run_blocking
from aioflux.integrations.fsspec._entries import (
    Tree,
    directory_entry,
    level_entries,
    level_tree,
    object_entry,
    tree_of,
    walk_tree,
    within_depth,
)
from aioflux.integrations.fsspec._options import (
    FILE_CACHE_KEYWORDS,
    block_size_option,
    store_options,
)
from aioflux.integrations.fsspec._paths import split_path, strip_protocol
from aioflux.integrations.fsspec._read_file import ReadFile
from aioflux.integrations.fsspec._transfers import (
    LargeTransferSlots,
    cat_slices,
    copy_object,
    download,
    pair_slices,
    upload,
)
from aioflux.integrations.fsspec._write_file import (
    CompressedFile,
    DeferredWrite,
    TextFile,
    Transaction,
    WriteFile,
    open_writer,
)
from aioflux.store import open_store, sessions_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
    from datetime import datetime
    from types import TracebackType

    from aioflux._values.meta import ObjectMeta
    from aioflux.integrations.fsspec._entries import Entry
    from aioflux.integrations.fsspec._paths import ObjectPath
    from aioflux.integrations.fsspec._transfers import Callback
    from aioflux.options import StoreOptions
    from aioflux.store import Store, WriteMode

    Metas = dict[ObjectPath, ObjectMeta]

__all__ = ["AiofluxFileSystem"]

_EXAMPLE_BUCKETS: Final = {"file": "/", "az": "account/container"}
"""Buckets to check options with, by scheme; `bucket` for the others."""

_SIGNING: Final = {
    "gs": "google-cloud-storage's Blob.generate_signed_url does",
    "s3": "boto3's generate_presigned_url does",
    "az": "azure-storage-blob's generate_blob_sas does",
    "file": "signed urls are for objects that are read over HTTP",
    "memory": "signed urls are for objects that are read over HTTP",
}
"""Libraries that sign urls, by scheme."""

_MAX_DIRECTORIES: Final = 256
"""Local directories whose stores are cached."""

_MAX_OBJECTS: Final = 128
"""Objects of which `cat_ranges` reads ranges at once; requests have the limits of the store."""

_CLOSE_SECONDS: Final = 5.0
"""Time that connections on fsspec's own loop have to close at the end of the process."""

_LABELS: tuple[str, ...] = ("content_type", "metadata")


@add_blocking_methods
class AiofluxFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Objects below one scheme as an fsspec filesystem, asynchronous and blocking.

    Blocking calls run on the background loop of aioflux: in notebooks, in threads, in forked
    children. Coroutines run on the loop that awaits them. A filesystem pickles with its options and
    without credentials.

    Objects appear whole or not at all: nothing is visible of a file before it is closed, and an
    exception in its `with` block stores nothing. Listings are not cached. Directories are prefixes
    of objects: making one does nothing, and it is gone with its last object. `exists`, `isdir` and
    `isfile` raise errors of the service and do not take them for an absence.

    Args:
        asynchronous: Whether the user awaits the coroutines; makes no difference here.
        loop: Run blocking calls on this loop, which another thread runs.
        batch_size: Most files that `put`, `get` and `copy` transfer at once.
        storage_options: `credentials`, `endpoint_url`, `transfer`, `retry`, `timeouts`,
            `ssl_context` and `progress`, as `aioflux.open_store`; policies may be mappings.
            `default_block_size` is that of `open`. Options of gcsfs, s3fs and adlfs that name
            credentials, an endpoint or a region apply to their scheme, and those of their caches
            have no effect: see docs/fsspec.md.

    Raises:
        TypeError: There is no such option with the scheme.
        ValueError: An option has no effect with the scheme.
    """

    scheme: ClassVar[str]
    """Scheme of the uris that `aioflux.open_store` is given."""

    # `_blocking_methods` has added blocking methods to the class: fsspec adds none to an instance.
    mirror_sync_methods = False
    transaction_type = Transaction

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        batch_size: int | None = None,
        **storage_options: Any,
    ) -> None:
        if self._cached:
            return  # fsspec calls __init__ again on an instance from its cache
        # fsspec starts no thread of its own for an asynchronous filesystem.
        super().__init__(asynchronous=True, batch_size=batch_size)
        self.asynchronous = asynchronous
        self.own_loop = loop
        self.default_block_size = block_size_option(storage_options)
        self.account_name = str(storage_options.get("account_name") or "")
        self.options = store_options(self.scheme, storage_options)
        # Rejects options that cannot be used, and knows whether they pickle.
        bucket = _EXAMPLE_BUCKETS.get(self.scheme, "bucket")
        self._model = open_store(f"{self.scheme}://{bucket}", **self.options)
        max_stores = _MAX_DIRECTORIES if self.scheme == "file" else None
        self._stores = StoreCache(partial(_open_store, self.options), max_stores=max_stores)
        self._slots = LargeTransferSlots()
        _filesystems[id(self)] = self  # equal ones have equal hashes

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that blocking calls run on."""
        return self.own_loop or _bridge.background_loop()

    @property
    def fsid(self) -> str:
        """An id that filesystems with the same objects share."""
        endpoint = self.options.get("endpoint_url") or ""
        if self.scheme == "gs" and not endpoint:
            endpoint = os.environ.get("STORAGE_EMULATOR_HOST", "")
        return f"aioflux+{self.scheme}({endpoint})"

    def __reduce__(self) -> tuple[Any, ...]:
        self._model.__reduce__()  # raises if credentials would be pickled
        reduced: tuple[Any, ...] = super().__reduce__()
        return reduced

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Describe the filesystem for `to_json`.

        Raises:
            TypeError: It was given credentials, which are never serialized.
        """
        self._model.__reduce__()
        described: dict[str, Any] = super().to_dict(include_password=include_password)
        return described

    async def aclose(self) -> None:
        """Close the connections of the running loop; the next call opens others.

        Only needed by callers that await coroutines on a loop of their own, before that loop ends.
        """
        for store in list(self._stores.values()):
            await sessions_of(store).close_current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def sign(self, path: str, expiration: int = 100, **kwargs: Any) -> str:
        """Raise: aioflux signs no urls.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"aioflux signs no urls, and so none for {path!r}; {_SIGNING[self.scheme]}"
        )

    # --- Paths ---------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return strip_protocol(stringify_path(path), cls.protocol, cls.root_marker)

    def unstrip_protocol(self, name: str) -> str:
        """Return a path with its protocol: the plain one if that is registered for aioflux."""
        path = self._strip_protocol(name)
        is_plain = registry.get(self.scheme) is type(self)
        return f"{self.scheme if is_plain else f'aio{self.scheme}'}://{path}"

    def _strip_all(self, path: Any) -> list[str]:
        paths = path if isinstance(path, (list, tuple, set)) else [path]
        return [self._strip_protocol(each) for each in paths]

    def _split(self, path: Any) -> ObjectPath:
        """Split a path into the uri of a store and a key; see `split_path`."""
        parsed = split_path(self.scheme, self._strip_protocol(path))
        if self.account_name and parsed.base.partition("/")[0] != self.account_name:
            raise ValueError(
                f"{path!r} is not of the account {self.account_name!r} that account_name names; "
                f"write {self.account_name}/container/key"
            )
        return parsed

    def _split_object(self, path: Any) -> ObjectPath:
        """Split the path of an object that is read or written."""
        parsed = self._split(path)
        if not parsed.key:
            raise ValueError(f"{path!r} names no object; write {parsed.base}key")
        return parsed

    def _store(self, path: ObjectPath) -> Store:
        return self._stores[path.store_uri]

    # --- Files ---------------------------------------------------------------------------

    def open(
        self,
        path: Any,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open an object as a file: "r", "w", "x" (must be new) and "a", as text or binary ("b").

        Appending reads and rewrites the object; it fails if the object is replaced meanwhile.

        Args:
            path: The object.
            mode: One of the above.
            block_size: Least bytes of a request after a seek; 1 MiB by default.
            cache_options: Without effect.
            compression: A name that fsspec knows, or "infer" for that of the path's suffix.
            kwargs: `content_type` and `metadata` of an object that is written, and for text
                `encoding`, `errors` and `newline`. `cache_type`, `default_cache`, `fill_cache` and
                `size`, as files of gcsfs and s3fs take them, are without effect.

        Raises:
            TypeError: There is no such keyword.
            NotFoundError: There is no such object to read.
            AlreadyExistsError: The object exists and had to be new.
        """
        text = {
            name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs
        }
        is_text = "b" not in mode
        if text and not is_text:
            raise ValueError(f"{', '.join(text)} has no effect with the binary mode {mode!r}")
        binary = mode.replace("t", "") + "b" if is_text else mode
        file = super().open(path, binary, block_size=block_size, **kwargs)
        name = get_compression(self._strip_protocol(path), compression)
        if name is not None:
            file = CompressedFile(compr[name](file, mode=binary[0]), file)
        if not is_text:
            return file
        return (io.TextIOWrapper if binary == "rb" else TextFile)(file, **text)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> ReadFile | WriteFile:
        labels = {name: kwargs.pop(name) for name in _LABELS if name in kwargs}
        unknown = sorted(set(kwargs) - FILE_CACHE_KEYWORDS)
        if unknown:
            raise TypeError(f"open takes no {unknown[0]!r}")
        parsed = self._split_object(path)
        store = self._store(parsed)
        if mode == "rb":
            meta = _bridge.run(store.head(parsed.key))
            size = block_size or self.default_block_size
            return ReadFile(self, parsed.base, store, meta, block_size=size)
        held = _bridge.Held(open_writer(store, parsed.key, mode, labels))
        return WriteFile(self, parsed.path, parsed.uri, held, mode=mode, autocommit=autocommit)

    async def open_async(self, path: Any, mode: str = "rb", **kwargs: Any) -> AsyncFile:
        """Open an object as a file whose methods are awaited: "rb", "wb", "xb" or "ab".

        Without `async with`, `close` has to be awaited.
        """
        labels = {name: kwargs.pop(name) for name in _LABELS if name in kwargs}
        parsed = self._split_object(path)
        store = self._store(parsed)
        manager: Any = (
            store.open_reader(parsed.key)
            if mode == "rb"
            else open_writer(store, parsed.key, mode, labels)
        )
        return AsyncFile(self, parsed.path, mode, manager, await manager.__aenter__())

    # --- Listings and metadata: one request for a page of a listing, and one for an object ---

    async def _info(self, path: Any, **kwargs: Any) -> Entry:
        """Describe the object of this name, or else the directory."""
        name = self._strip_protocol(path)
        if not name:
            return directory_entry(name)
        parsed = self._split(name)
        if not parsed.key:
            await self._has_entries(parsed)  # raises if there is no such bucket
            return directory_entry(name)
        meta = await self._head_object(parsed)
        return directory_entry(name) if meta is None else object_entry(parsed.base, meta)

    async def _head_object(self, path: ObjectPath) -> ObjectMeta | None:
        """Return the metadata of an object, None for a directory; raise if there is neither."""
        try:
            return await self._store(path).head(path.key)
        except NotFoundError:
            if await self._has_entries(path):
                return None
            raise

    async def _has_entries(self, path: ObjectPath) -> bool:
        return bool(await self._first_name(path, path.prefix))

    async def _first_name(self, path: ObjectPath, prefix: str) -> str:
        """Return the first key or directory that begins with a prefix; "" if there is none."""
        pages = self._store(path).list_pages(prefix, delimiter="/", page_size=1)
        async with aclosing(pages) as inner:
            async for page in inner:
                first: str = min([*page.keys, *page.prefixes])
                return first
        return ""

    async def _ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List one level of a directory, or the object of this name, sorted."""
        parsed = self._split(path)
        store = self._store(parsed)
        listing = await store.list_all(parsed.prefix, delimiter="/")
        entries = level_entries(parsed.base, listing)
        if not (listing or listing.prefixes) and parsed.key:
            entries = [object_entry(parsed.base, await store.head(parsed.key))]
        return entries if detail else [each["name"] for each in entries]

    async def _isfile(self, path: Any) -> bool:
        """Return whether there is an object of this name; costs one request."""
        name = self._strip_protocol(path)
        parsed = self._split(name) if name else None
        if parsed is None or not parsed.key:
            return False
        try:
            await self._store(parsed).head(parsed.key)
        except NotFoundError:
            return False
        return True

    async def _isdir(self, path: Any) -> bool:
        """Return whether `info` describes a directory; costs one request, at times two.

        Of the names that begin with the path, that of the object itself is listed first. Other
        objects may come before the directory, such as `a-b` before `a/`: only then a second request
        is needed.
        """
        name = self._strip_protocol(path)
        if not name:
            return True
        parsed = self._split(name)
        try:
            if not parsed.key:
                await self._has_entries(parsed)  # raises if there is no such bucket
                return True
            if self.scheme == "file":
                # A local name is a file or a directory, and its siblings may be many.
                return await self._has_entries(parsed)
            first = await self._first_name(parsed, parsed.key)
            if not first or first == parsed.key:
                return False
            return first.startswith(parsed.prefix) or await self._has_entries(parsed)
        except NotFoundError:
            return False
        except PermissionDeniedError:
            # A caller who may read the object but list nothing still learns that it is none.
            if parsed.key and await self._isfile(name):
                return False
            raise

    async def _list_tree(self, path: str, prefix: str, maxdepth: int | None) -> Tree:
        """Return the directories and objects below a path, from one listing."""
        parsed = self._split(path)
        delimiter = "/" if maxdepth == 1 else ""
        listing = await self._store(parsed).list_all(parsed.prefix + prefix, delimiter=delimiter)
        return (level_tree if delimiter else tree_of)(path, parsed.base, listing)

    async def _find(
        self,
        path: Any,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """List all objects below a path, or the object of this name, sorted, from one listing."""
        name = self._strip_protocol(path)
        tree = await self._list_tree(name, prefix, maxdepth)
        entries = dict(tree.objects)
        if withdirs:
            directories = dict(tree.directories)
            if prefix:
                directories.pop(name, None)
            entries = {**directories, **entries}
        if not entries and not prefix and (parsed := self._split(name)).key:
            try:
                entries = {
                    name: object_entry(parsed.base, await self._store(parsed).head(parsed.key))
                }
            except NotFoundError:
                entries = {}
        names = within_depth(name, entries, maxdepth)
        return {each: entries[each] for each in names} if detail else names

    async def _walk(
        self,
        path: Any,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] = "omit",
        detail: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """Yield `(path, directories, objects)` of a directory and of those below, as `os.walk`.

        All is listed at once; directories that the caller removes are not entered.
        """
        name = self._strip_protocol(path)
        within_depth(name, (), maxdepth)  # rejects a depth below 1
        try:
            tree = await self._list_tree(name, "", maxdepth)
            if not tree.directories and self._split(name).key:
                entry = await self._info(name)
                is_object = entry["type"] == "file"
                objects = {f"{name}/": entry} if is_object else {}
                tree = Tree({name: directory_entry(name)}, objects)
        except OSError as exc:
            if on_error == "raise":
                raise
            if callable(on_error):
                on_error(exc)
            tree = Tree({}, {})
        steps = walk_tree(
            name, tree, root=self.root_marker, maxdepth=maxdepth, topdown=topdown, detail=detail
        )
        for step in steps:
            yield step

    async def _du(
        self,
        path: Any,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: Any,
    ) -> Any:
        entries = await self._find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        sizes = {name: each["size"] for name, each in entries.items()}
        return sum(sizes.values()) if total else sizes

    async def _modified(self, path: Any) -> datetime:
        """Return when an object was last changed; of a directory, the newest below it, in UTC."""
        entry = await self._info(path)
        entries = [entry]
        if entry["type"] == "directory":
            entries = list((await self._find(path, detail=True)).values())
        times = [each["mtime"] for each in entries if each["mtime"] is not None]
        if not times:
            raise NotFoundError(f"nothing below {path!r} has a time", uri=str(path))
        newest: datetime = max(times)
        return newest

    async def _created(self, path: Any) -> datetime:
        """Return the same as `modified`: an object is never changed, only replaced."""
        return await self._modified(path)

    # --- Reads of whole objects and of ranges --------------------------------------------

    async def _cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Read an object, or the slice `[start:end]` of it."""
        parsed = self._split_object(path)
        store = self._store(parsed)
        if not start and end is None:
            return await store.get(parsed.key)
        first = start or 0
        if first >= 0 and end is not None and end > first:
            return await store.get_range(parsed.key, start=first, end=end)
        return (await cat_slices(store, parsed.key, [(start, end)], None))[0]

    async def _cat_ranges(
        self,
        paths: Any,
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Read slices of objects, in the order given, near ones as `Store.get_ranges` does.

        At most `batch_size` objects are read at once.
        """
        groups: dict[str, list[int]] = {}
        pairs = pair_slices(paths, starts, ends)
        for number, (path, _) in enumerate(pairs):
            groups.setdefault(self._strip_protocol(path), []).append(number)
        results: list[Any] = [b""] * len(pairs)

        async def read(path: str) -> None:
            numbers = groups[path]
            slices = [pairs[number][1] for number in numbers]
            outcomes: list[Any]
            try:
                parsed = self._split_object(path)
                outcomes = await cat_slices(self._store(parsed), parsed.key, slices, max_gap)
            except (OSError, AiofluxError, ValueError, TypeError) as exc:
                outcomes = [exc] * len(numbers)
            for number, outcome in zip(numbers, outcomes, strict=True):
                results[number] = outcome

        max_in_flight = batch_size or self.batch_size or _MAX_OBJECTS
        if max_in_flight < 1:  # -1 is no limit in fsspec
            max_in_flight = _MAX_OBJECTS
        await gather_bounded(read, list(groups), max_in_flight=max_in_flight)
        if on_error != "return":
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return results

    async def _cat(
        self,
        path: Any,
        recursive: bool = False,
        on_error: str = "raise",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read objects: the bytes of one, or a dictionary of those that several paths match."""
        given = self._strip_all(path)
        if recursive:
            names = set()
            for each in given:
                for name in await self._glob(each) if has_magic(each) else [each]:
                    names.update(await self._find(name))
            expanded = sorted(names)
            if not expanded:
                raise _nothing_at(self.unstrip_protocol(given[0]))
        else:
            expanded = await self._expand_path(path)
        if not isinstance(path, (list, tuple, set)) and expanded == given:
            return await self._cat_file(expanded[0], **kwargs)
        if kwargs:
            return await super()._cat(expanded, on_error=on_error, batch_size=batch_size, **kwargs)
        return await self._cat_many(expanded, on_error)

    async def _cat_many(self, paths: list[str], on_error: str) -> dict[str, Any]:
        contents: dict[str, Any] = {}
        for store_uri, group in _by_store(map(self._split_object, paths)).items():
            keys = [each.key for each in group]
            batches = self._stores[store_uri].try_fetch_batches(keys)
            outcomes = [outcome async for batch in batches for outcome in batch]
            for each, (meta, data) in zip(group, outcomes, strict=True):
                if meta is not None or on_error == "return":
                    contents[each.path] = data
                elif on_error == "raise":
                    assert isinstance(data, Exception)
                    raise data
        return {path: contents[path] for path in paths if path in contents}

    async def _head(self, path: Any, size: int = 1024) -> bytes:
        return await self._cat_file(path, 0, size)

    async def _tail(self, path: Any, size: int = 1024) -> bytes:
        return await self._cat_file(path, -size) if size else b""

    async def _get_file(
        self,
        rpath: Any,
        lpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        outfile: IO[bytes] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write an object to a local file, which appears whole; make a local directory for one."""
        parsed = self._split(rpath)
        target: Path | IO[bytes]
        if outfile is not None or isfilelike(lpath):
            target = outfile if outfile is not None else lpath
        else:
            target = Path(os.fspath(lpath))
        meta = await self._head_object(parsed) if parsed.key else None
        if meta is not None:
            if isinstance(target, Path):
                target.parent.mkdir(parents=True, exist_ok=True)
            await download(self._store(parsed), meta, target, callback=callback, slots=self._slots)
        elif isinstance(target, Path):
            target.mkdir(parents=True, exist_ok=True)

    # --- Writes of whole objects ---------------------------------------------------------

    async def _write(self, write: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a write; in a transaction, at the end of it."""
        if self._intrans:
            self.transaction.files.append(DeferredWrite(partial(run_blocking, self, write)))
        else:
            await write()

    async def _pipe_file(
        self,
        path: Any,
        value: bytes | bytearray | memoryview,
        mode: WriteMode = "overwrite",
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write an object, whole; in a transaction, at the end of it."""
        parsed = self._split_object(path)
        put = partial(
            self._store(parsed).put,
            parsed.key,
            value,
            mode=mode,
            content_type=content_type,
            metadata=metadata,
        )
        await self._write(put)

    async def _put_file(
        self,
        lpath: Any,
        rpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        mode: WriteMode = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Write a local file as an object, as `_pipe_file` does; skip a directory."""
        source = Path(lpath)
        if await asyncio.to_thread(source.is_dir):
            return
        parsed = self._split_object(rpath)
        store = self._store(parsed)
        put = partial(
            upload, store, parsed.key, source, mode=mode, callback=callback, slots=self._slots
        )
        await self._write(put)

    async def _touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        """Write an empty object, or with `truncate=False` renew the time of an object."""
        parsed = self._split_object(path)
        store = self._store(parsed)
        if not truncate:
            try:
                await store.copy(await store.head(parsed.key), parsed.key)
            except NotFoundError:
                await self._pipe_file(path, b"", mode="create")
            return
        await self._pipe_file(path, b"")

    # --- Copies, moves and removals ------------------------------------------------------

    async def _cp_file(
        self, path1: Any, path2: Any, copied: Metas | None = None, **kwargs: Any
    ) -> None:
        """Copy an object, on the service if both are in one bucket; skip a directory.

        The metadata of the object that was copied is added to `copied`.
        """
        source, target = self._split(path1), self._split_object(path2)
        meta = await self._head_object(source) if source.key else None
        if meta is None:
            return
        store = self._store(source)
        if source.store_uri == target.store_uri:
            await store.copy(meta, target.key)
        else:
            await copy_object(store, meta, self._store(target), target.key, slots=self._slots)
        if copied is not None:
            copied[source] = meta

    async def _mv_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Copy an object, and delete the generation that was copied."""
        copied: Metas = {}
        await self._cp_file(path1, path2, copied=copied)
        if not copied:
            raise IsADirectoryError(f"{path1!r} is a directory; move it with recursive=True")
        await self._delete_objects(copied)

    async def _mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy objects, and delete the generations that were copied."""
        if path1 == path2:
            return
        copied: Metas = {}
        await self._copy(
            path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", copied=copied
        )
        await self._delete_objects(copied)

    async def _rm_file(self, path: Any, **kwargs: Any) -> None:
        parsed = self._split_object(path)
        try:
            await self._store(parsed).delete(parsed.key)
        except NotFoundError:
            if await self._has_entries(parsed):
                raise _is_directory(path) from None
            raise

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Delete objects, and with `recursive` those below directories, many at once.

        If a path matches nothing, nothing is deleted.
        """
        metas: Metas = {}
        for each in self._strip_all(path):
            names = await self._glob(each) if has_magic(each) else [each]
            if not names:
                raise _nothing_at(self.unstrip_protocol(each))
            for name in names:
                metas |= await self._list_for_removal(name, recursive, maxdepth)
        await self._delete_objects(metas)

    async def _list_for_removal(self, path: str, recursive: bool, maxdepth: int | None) -> Metas:
        """Return the objects that the removal of a path deletes, in their present generations."""
        parsed = self._split(path)
        store = self._store(parsed)
        metas: Metas = {}
        if parsed.key and recursive:
            with suppress(NotFoundError):
                metas[parsed] = await store.head(parsed.key)
        elif parsed.key:
            if (meta := await self._head_object(parsed)) is None:
                raise _is_directory(path)
            metas[parsed] = meta
        if recursive:
            deepest = None if maxdepth is None else path.count("/") + maxdepth
            for meta in await store.list_all(parsed.prefix):
                name = parsed.base + meta.key
                if deepest is None or name.rstrip("/").count("/") <= deepest:
                    metas[parsed._replace(key=meta.key)] = meta
        if not metas and parsed.key:
            raise _nothing_at(self.unstrip_protocol(path))
        return metas

    async def _delete_objects(self, metas: Metas) -> None:
        for store_uri, group in _by_store(metas).items():
            result = await self._stores[store_uri].delete_many([metas[each] for each in group])
            if result.errors:
                error = next(iter(result.errors.values()))
                error.add_note(f"{len(result.errors)} of {len(group)} objects were not deleted")
                raise error


def _open_store(options: StoreOptions, uri: str) -> Store:
    return _bridge.close_when_dropped(open_store(uri, **options))


def _by_store(paths: Iterable[ObjectPath]) -> dict[str, list[ObjectPath]]:
    groups: dict[str, list[ObjectPath]] = {}
    for path in paths:
        groups.setdefault(path.store_uri, []).append(path)
    return groups


def _is_directory(path: Any) -> IsADirectoryError:
    return IsADirectoryError(
        f"{path!r} is a directory; remove the objects below it with recursive=True"
    )


def _nothing_at(uri: str) -> NotFoundError:
    return NotFoundError(f"there is nothing at {uri}; list its prefix to see what exists", uri=uri)


_filesystems: weakref.WeakValueDictionary[int, AiofluxFileSystem] = weakref.WeakValueDictionary()


@atexit.register
def _close_on_loop_of_fsspec() -> None:
    """Close connections on the loop of fsspec, which its generic filesystem uses, for example.

    The bridge closes those on its own loop, and the owner of any other loop those on that.
    """
    loop = asyn.loop[0]
    if loop is None or not loop.is_running():
        return
    for fs in list(_filesystems.values()):
        if any(loop in sessions_of(store) for store in list(fs._stores.values())):  # noqa: SLF001
            asyn.sync(loop, fs.aclose, timeout=_CLOSE_SECONDS)
