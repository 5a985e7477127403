"""The fsspec filesystem over `Store`.

Over 500 lines: fsspec expects all methods in one class. `_paths` splits paths, `_entries` builds
entries from listings, `_transfers` copies object data, and `_read_file` and `_write_file` have the
files that `open` returns.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Self, Unpack

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
from aioflux.errors import AiofluxError, NotFoundError, PermissionDeniedError, UnsupportedError
from aioflux.integrations.fsspec._async_file import AsyncFile
from aioflux.integrations.fsspec._blocking_methods import add_blocking_methods, run_blocking
from aioflux.integrations.fsspec._entries import (
    Tree,
    build_level_tree,
    build_tree,
    directory_entry,
    level_entries,
    object_entry,
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
    download_into,
    pair_slices,
)
from aioflux.integrations.fsspec._write_file import (
    CompressedFile,
    DeferredWrite,
    TextFile,
    Transaction,
    WriteFile,
    open_writer,
)
from aioflux.options import WriteAttributes
from aioflux.store import open_store, sessions_of

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.integrations.fsspec._entries import Entry
    from aioflux.integrations.fsspec._paths import ObjectPath
    from aioflux.integrations.fsspec._transfers import Callback
    from aioflux.options import StoreOptions
    from aioflux.store import Store, UrlMethod, WriteMode

    Metas = dict[ObjectPath, ObjectMeta]

_EXAMPLE_BUCKETS: Final = {"file": "/", "az": "account/container"}
"""Bucket of the store that is opened only to check the options, by scheme; otherwise "bucket"."""

_MAX_DIRECTORIES: Final = 256
"""Maximum number of local directories whose stores are cached."""

_MAX_OBJECTS: Final = 128
"""Objects that `cat_ranges` reads at the same time. The store limits the number of requests."""

_CLOSE_SECONDS: Final = 5.0
"""Maximum time to close the connections on fsspec's event loop when the process exits."""

_WRITE_OPTIONS = frozenset(WriteAttributes.__annotations__)


@add_blocking_methods
class AiofluxFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec filesystem of all buckets of one scheme, with blocking methods and coroutines.

    Blocking methods run on the background event loop of aioflux, also in notebooks, in threads and
    in forked children. Coroutines run on the event loop that awaits them. A filesystem can be
    pickled with its options, but not if the options contain a secret.

    A file becomes visible, whole, when it is closed; an exception in its `with` block stores
    nothing. Listings are not cached. A directory is a prefix of keys: `mkdir` does nothing, and a
    directory disappears with its last object. When a request fails, `exists`, `isdir` and `isfile`
    raise the error and do not return False.

    Args:
        asynchronous: Kept as an attribute for libraries that check it; otherwise without effect.
        loop: Event loop of another thread to run blocking methods on; None for aioflux's own.
        batch_size: Maximum number of files that `put`, `get` and `copy` transfer at once.
        storage_options: Options of `aioflux.open_store`: `credentials`, `endpoint_url`, `transfer`,
            `retry`, `timeouts`, `ssl_context` and `progress`. A policy may also be a mapping of its
            fields. `default_block_size` is the default `block_size` of `open`. Each scheme accepts
            the options of gcsfs, s3fs or adlfs for credentials, endpoint and region, and ignores
            the options for their caches: see docs/fsspec.md.

    Raises:
        TypeError: The scheme has no such option.
        ValueError: The scheme has the option, but cannot use its value.
    """

    scheme: ClassVar[str]
    """Scheme of the uris that are passed to `aioflux.open_store`."""

    # `add_blocking_methods` has added the blocking methods to the class, so fsspec must not.
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
            return  # fsspec calls __init__ again when it returns a cached instance
        # With asynchronous=True fsspec starts no thread.
        super().__init__(asynchronous=True, batch_size=batch_size)
        self.asynchronous = asynchronous
        self.own_loop = loop
        self.default_block_size = block_size_option(storage_options)
        self.account_name = str(storage_options.get("account_name") or "")
        self.options = store_options(self.scheme, storage_options)
        # This store is opened to reject unusable options now, and pickled to find secrets in them.
        bucket = _EXAMPLE_BUCKETS.get(self.scheme, "bucket")
        self._example_store = open_store(f"{self.scheme}://{bucket}", **self.options)
        max_stores = _MAX_DIRECTORIES if self.scheme == "file" else None
        self._stores = StoreCache(partial(_open_store, self.options), max_stores=max_stores)
        self._slots = LargeTransferSlots()
        _filesystems[id(self)] = self  # by id, because equal filesystems have equal hashes

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that runs the blocking methods."""
        return self.own_loop or _bridge.background_loop()

    @property
    def fsid(self) -> str:
        """An id that is equal for filesystems with the same objects."""
        endpoint = self.options.get("endpoint_url") or ""
        if self.scheme == "gs" and not endpoint:
            endpoint = os.environ.get("STORAGE_EMULATOR_HOST", "")
        return f"aio{self.scheme}({endpoint})"

    def __reduce__(self) -> tuple[Any, ...]:
        self._example_store.__reduce__()  # raises if the options contain a secret
        reduced: tuple[Any, ...] = super().__reduce__()
        return reduced

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the class and options of the filesystem, as `to_json` serializes them.

        Raises:
            TypeError: The options contain a secret, which is never serialized.
        """
        self._example_store.__reduce__()
        described: dict[str, Any] = super().to_dict(include_password=include_password)
        return described

    async def aclose(self) -> None:
        """Close the connections of the running event loop; the next call opens new connections.

        Needed only after coroutines were awaited on the caller's own event loop: call `aclose` on
        this loop before the loop is closed.
        """
        for store in list(self._stores.values()):
            await sessions_of(store).close_current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- Paths ---------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        return strip_protocol(stringify_path(path), cls.protocol, cls.root_marker)

    def unstrip_protocol(self, name: str) -> str:
        """Return a path with its protocol.

        This is the scheme, such as `gs://`, if this class is registered for the scheme in fsspec;
        otherwise "aio" and the scheme, such as `aiogs://`.
        """
        path = self._strip_protocol(name)
        is_plain = registry.get(self.scheme) is type(self)
        return f"{self.scheme if is_plain else f'aio{self.scheme}'}://{path}"

    def _strip_all(self, path: Any) -> list[str]:
        paths = path if isinstance(path, (list, tuple, set)) else [path]
        return [self._strip_protocol(item) for item in paths]

    def _split(self, path: Any) -> ObjectPath:
        parsed = split_path(self.scheme, self._strip_protocol(path))
        if self.account_name and parsed.base.partition("/")[0] != self.account_name:
            raise ValueError(
                f"{path!r} is not in the account {self.account_name!r} of the storage option "
                f"account_name; write {self.account_name}/container/key"
            )
        return parsed

    def _split_object(self, path: Any) -> ObjectPath:
        """Split the path of an object; reject a path without a key."""
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
        """Open an object as a file.

        Appending copies the object into a new one, and fails if another writer replaces the object
        before the file is closed.

        Args:
            path: Path of the object.
            mode: "r", "w", "x" (fails if the object exists) or "a", for text; with "b" for bytes.
            block_size: Minimum number of bytes that a read requests; 1 MiB by default.
            cache_options: Without effect.
            compression: Name of a compression of fsspec; "infer" to choose by the path's suffix.
            kwargs: Attributes of a written object, as for `Store.put`; `encoding`, `errors` and
                `newline` of text. The keywords `cache_type`, `default_cache`, `fill_cache` and
                `size` of gcsfs and s3fs have no effect.

        Raises:
            TypeError: There is no such keyword.
            NotFoundError: The object to read does not exist.
            AlreadyExistsError: The mode is "x" and the object exists.
        """
        text = {
            name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs
        }
        is_text = "b" not in mode
        if text and not is_text:
            raise ValueError(f"{', '.join(text)} has no effect with the binary mode {mode!r}")
        binary = mode.replace("t", "") + "b" if is_text else mode
        file = super().open(path, binary, block_size=block_size, **kwargs)
        codec = get_compression(self._strip_protocol(path), compression)
        if codec is not None:
            file = CompressedFile(compr[codec](file, mode=binary[0]), file)
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
        options = {name: kwargs.pop(name) for name in _WRITE_OPTIONS if name in kwargs}
        unknown = sorted(set(kwargs) - FILE_CACHE_KEYWORDS)
        if unknown:
            raise TypeError(f"open has no keyword {unknown[0]!r}")
        parsed = self._split_object(path)
        store = self._store(parsed)
        if mode == "rb":
            meta = _bridge.run(store.head(parsed.key))
            size = block_size or self.default_block_size
            return ReadFile(self, parsed.base, store, meta, block_size=size)
        context = _bridge.OpenContext(open_writer(store, parsed.key, mode, options))
        return WriteFile(self, parsed.path, parsed.uri, context, mode=mode, autocommit=autocommit)

    async def open_async(self, path: Any, mode: str = "rb", **kwargs: Any) -> AsyncFile:
        """Open an object as an asynchronous file, in the mode "rb", "wb", "xb" or "ab".

        A caller that does not use `async with` has to await `close`.
        """
        options = {name: kwargs.pop(name) for name in _WRITE_OPTIONS if name in kwargs}
        parsed = self._split_object(path)
        store = self._store(parsed)
        manager: Any = (
            store.open_reader(parsed.key)
            if mode == "rb"
            else open_writer(store, parsed.key, mode, options)
        )
        return AsyncFile(self, parsed.path, mode, manager, await manager.__aenter__())

    # --- Listings and metadata -----------------------------------------------------------

    async def _info(self, path: Any, **kwargs: Any) -> Entry:
        """Return the entry of the object at a path or, if no object exists, of the directory."""
        name = self._strip_protocol(path)
        if not name:
            return directory_entry(name)
        parsed = self._split(name)
        if not parsed.key:
            await self._has_entries(parsed)  # raises if the bucket does not exist
            return directory_entry(name)
        meta = await self._head_object(parsed)
        return directory_entry(name) if meta is None else object_entry(parsed.base, meta)

    async def _head_object(self, path: ObjectPath) -> ObjectMeta | None:
        """Return the metadata of an object, or None for a directory; raise if neither exists."""
        try:
            return await self._store(path).head(path.key)
        except NotFoundError:
            if await self._has_entries(path):
                return None
            raise

    async def _has_entries(self, path: ObjectPath) -> bool:
        return bool(await self._first_name(path, path.prefix))

    async def _first_name(self, path: ObjectPath, prefix: str) -> str:
        """Return the first key or directory that begins with a prefix, or "" if none exists."""
        pages = self._store(path).list_pages(prefix, delimiter="/", page_size=1)
        async with aclosing(pages) as open_pages:
            async for page in open_pages:
                first: str = min([*page.keys, *page.prefixes])
                return first
        return ""

    async def _ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Return the sorted entries in a directory or, if it has none, the entry of the object."""
        parsed = self._split(path)
        store = self._store(parsed)
        listing = await store.list_all(parsed.prefix, delimiter="/")
        entries = level_entries(parsed.base, listing)
        if not (listing or listing.prefixes) and parsed.key:
            entries = [object_entry(parsed.base, await store.head(parsed.key))]
        return entries if detail else [entry["name"] for entry in entries]

    async def _isfile(self, path: Any) -> bool:
        """Return whether an object exists at the path; costs one request."""
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
        """Return whether the path is a directory and not an object. Costs one request, rarely two.

        The request lists the first name that begins with the path. For an object this is the path
        itself. If another name sorts before the directory, as `a-b` sorts before `a/`, a second
        request lists the directory.
        """
        name = self._strip_protocol(path)
        if not name:
            return True
        parsed = self._split(name)
        try:
            if not parsed.key:
                await self._has_entries(parsed)  # raises if the bucket does not exist
                return True
            if self.scheme == "file":
                # A local path is a file or a directory, never both. Do not list its siblings.
                return await self._has_entries(parsed)
            first = await self._first_name(parsed, parsed.key)
            if not first or first == parsed.key:
                return False
            return first.startswith(parsed.prefix) or await self._has_entries(parsed)
        except NotFoundError:
            return False
        except PermissionDeniedError:
            # Without permission to list: an object that can be read is not a directory.
            if parsed.key and await self._isfile(name):
                return False
            raise

    async def _list_tree(self, path: str, prefix: str, maxdepth: int | None) -> Tree:
        """Return the directories and objects below a path, from one listing."""
        parsed = self._split(path)
        delimiter = "/" if maxdepth == 1 else ""
        listing = await self._store(parsed).list_all(parsed.prefix + prefix, delimiter=delimiter)
        return (build_level_tree if delimiter else build_tree)(path, parsed.base, listing)

    async def _find(
        self,
        path: Any,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """Return all objects below a path or, if there are none, the object at the path; sorted."""
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
        return {name: entries[name] for name in names} if detail else names

    async def _walk(
        self,
        path: Any,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] = "omit",
        detail: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """Yield `(path, directories, objects)` of a directory and its subdirectories, as `os.walk`.

        The whole tree is listed first. Directories that the caller removes from the yielded list
        are not entered.
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
        sizes = {name: entry["size"] for name, entry in entries.items()}
        return sum(sizes.values()) if total else sizes

    async def _modified(self, path: Any) -> datetime:
        """Return the UTC time of the last write of an object, or of any object in a directory."""
        entry = await self._info(path)
        entries = [entry]
        if entry["type"] == "directory":
            entries = list((await self._find(path, detail=True)).values())
        times = [entry["mtime"] for entry in entries if entry["mtime"] is not None]
        if not times:
            raise NotFoundError(f"no object below {path!r} has a modification time", uri=str(path))
        newest: datetime = max(times)
        return newest

    async def _created(self, path: Any) -> datetime:
        """Return the same as `modified`, because an object can only be replaced as a whole."""
        return await self._modified(path)

    async def _sign(self, path: Any, expiration: float = 100, method: UrlMethod = "GET") -> str:
        """Return a url with which anyone can send requests for an object, for `expiration` seconds.

        Raises:
            NotImplementedError: The storage or the credentials sign no urls.
        """
        parsed = self._split_object(path)
        try:
            return await self._store(parsed).sign(parsed.key, method=method, expires=expiration)
        except UnsupportedError as exc:
            raise NotImplementedError(str(exc)) from exc

    # --- Reads of whole objects and of ranges --------------------------------------------

    async def _cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Read an object, or its bytes `[start:end]` with the rules of Python's slices."""
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
        """Read slices of objects; return the bytes, or errors, in the order of the arguments.

        Slices of one object that are close together share a request, as in `Store.get_ranges`. At
        most `batch_size` objects are read at once.
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
        if max_in_flight < 1:  # in fsspec, -1 means no limit
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
        """Return the bytes of one object, or a dictionary of all objects that a pattern matches."""
        patterns = self._strip_all(path)
        if recursive:
            names = set()
            for pattern in patterns:
                for name in await self._glob(pattern) if has_magic(pattern) else [pattern]:
                    names.update(await self._find(name))
            expanded = sorted(names)
            if not expanded:
                raise _not_found_error(self.unstrip_protocol(patterns[0]))
        else:
            expanded = await self._expand_path(path)
        if not isinstance(path, (list, tuple, set)) and expanded == patterns:
            return await self._cat_file(expanded[0], **kwargs)
        if kwargs:
            return await super()._cat(expanded, on_error=on_error, batch_size=batch_size, **kwargs)
        return await self._cat_many(expanded, on_error)

    async def _cat_many(self, paths: list[str], on_error: str) -> dict[str, Any]:
        contents: dict[str, Any] = {}
        for store_uri, group in _group_by_store(map(self._split_object, paths)).items():
            keys = [parsed.key for parsed in group]
            batches = self._stores[store_uri].try_fetch_batches(keys)
            outcomes = [outcome async for batch in batches for outcome in batch]
            for parsed, (meta, data) in zip(group, outcomes, strict=True):
                if meta is not None or on_error == "return":
                    contents[parsed.path] = data
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
        """Download an object to a local file, or create a local directory for a directory.

        The local file becomes visible when it is complete.
        """
        parsed = self._split(rpath)
        target: Path | IO[bytes]
        if outfile is not None or isfilelike(lpath):
            target = outfile if outfile is not None else lpath
        else:
            target = Path(os.fspath(lpath))
        meta = await self._head_object(parsed) if parsed.key else None
        if not isinstance(target, Path):
            if meta is not None:
                slots, store = self._slots, self._store(parsed)
                await download_into(store, meta, target, callback=callback, slots=slots)
        elif meta is None:
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            callback.set_size(meta.size)
            update = callback.relative_update
            await self._store(parsed).download_file(meta, target, progress=update)

    # --- Writes of whole objects ---------------------------------------------------------

    async def _write(self, write: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a write now or, in a transaction, when the transaction ends."""
        if self._intrans:
            self.transaction.files.append(DeferredWrite(partial(run_blocking, self, write)))
        else:
            await write()

    async def _pipe_file(
        self,
        path: Any,
        value: bytes | bytearray | memoryview,
        mode: WriteMode = "overwrite",
        **attributes: Unpack[WriteAttributes],
    ) -> None:
        """Write an object from memory; in a transaction, when the transaction ends."""
        parsed = self._split_object(path)
        put = partial(self._store(parsed).put, parsed.key, value, mode=mode, **attributes)
        await self._write(put)

    async def _put_file(
        self,
        lpath: Any,
        rpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        mode: WriteMode = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Upload a local file; in a transaction, when the transaction ends. Skip a directory."""
        source = Path(lpath)
        if await asyncio.to_thread(source.is_dir):
            return
        parsed = self._split_object(rpath)
        callback.set_size((await asyncio.to_thread(source.stat)).st_size)
        put, update = self._store(parsed).upload_file, callback.relative_update
        await self._write(partial(put, source, parsed.key, mode=mode, progress=update))

    async def _touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        """Write an empty object or, with `truncate=False`, update the time of an object."""
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
        """Copy an object; skip a directory.

        Within a bucket, the copy is server-side. Between buckets, this process transfers the data.
        The metadata of the source object is added to `copied`.
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
        """Rename an object with `Store.move`; between buckets, copy it, then delete it."""
        source, target = self._split(path1), self._split_object(path2)
        meta = await self._head_object(source) if source.key else None
        if meta is None:
            raise IsADirectoryError(f"{path1!r} is a directory; move it with recursive=True")
        if source.store_uri == target.store_uri:
            await self._store(source).move(meta, target.key)
            return
        copied: Metas = {}
        await self._cp_file(path1, path2, copied=copied)
        await self._delete_objects(copied)

    async def _mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy objects, then delete the generations of the sources that were copied."""
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
                raise _directory_error(path) from None
            raise

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Delete objects and, with `recursive`, all objects below directories, in batches.

        If one of the paths matches nothing, NotFoundError is raised and no object is deleted.
        """
        metas: Metas = {}
        for pattern in self._strip_all(path):
            names = await self._glob(pattern) if has_magic(pattern) else [pattern]
            if not names:
                raise _not_found_error(self.unstrip_protocol(pattern))
            for name in names:
                metas |= await self._list_for_removal(name, recursive, maxdepth)
        await self._delete_objects(metas)

    async def _list_for_removal(self, path: str, recursive: bool, maxdepth: int | None) -> Metas:
        """Return the current metadata of the objects that `rm` of the path deletes."""
        parsed = self._split(path)
        store = self._store(parsed)
        metas: Metas = {}
        if parsed.key and recursive:
            with suppress(NotFoundError):
                metas[parsed] = await store.head(parsed.key)
        elif parsed.key:
            if (meta := await self._head_object(parsed)) is None:
                raise _directory_error(path)
            metas[parsed] = meta
        if recursive:
            deepest = None if maxdepth is None else path.count("/") + maxdepth
            for meta in await store.list_all(parsed.prefix):
                name = parsed.base + meta.key
                if deepest is None or name.rstrip("/").count("/") <= deepest:
                    metas[parsed._replace(key=meta.key)] = meta
        if not metas and parsed.key:
            raise _not_found_error(self.unstrip_protocol(path))
        return metas

    async def _delete_objects(self, metas: Metas) -> None:
        for store_uri, group in _group_by_store(metas).items():
            result = await self._stores[store_uri].delete_many([metas[parsed] for parsed in group])
            if result.errors:
                error = next(iter(result.errors.values()))
                error.add_note(f"{len(result.errors)} of {len(group)} objects were not deleted")
                raise error


def _open_store(options: StoreOptions, uri: str) -> Store:
    return _bridge.close_when_dropped(open_store(uri, **options))


def _group_by_store(paths: Iterable[ObjectPath]) -> dict[str, list[ObjectPath]]:
    groups: dict[str, list[ObjectPath]] = {}
    for path in paths:
        groups.setdefault(path.store_uri, []).append(path)
    return groups


def _directory_error(path: Any) -> IsADirectoryError:
    return IsADirectoryError(
        f"{path!r} is a directory; remove the objects below it with recursive=True"
    )


def _not_found_error(uri: str) -> NotFoundError:
    return NotFoundError(f"{uri} does not exist; list its parent to see the names", uri=uri)


_filesystems: weakref.WeakValueDictionary[int, AiofluxFileSystem] = weakref.WeakValueDictionary()


@atexit.register
def _close_on_loop_of_fsspec() -> None:
    """Close the connections that fsspec's generic filesystem opens on fsspec's event loop.

    The bridge closes connections on its own event loop. On any other, the caller calls `aclose`.
    """
    loop = asyn.loop[0]
    if loop is None or not loop.is_running():
        return
    for fs in list(_filesystems.values()):
        if any(loop in sessions_of(store) for store in list(fs._stores.values())):  # noqa: SLF001
            asyn.sync(loop, fs.aclose, timeout=_CLOSE_SECONDS)
