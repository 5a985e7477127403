"""AiofluxFileSystem: fsspec's interface over Store, and the names that fsspec knows it by."""

from __future__ import annotations

import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fsspec.compression import compr  # type: ignore[import-untyped]
from fsspec.core import get_compression  # type: ignore[import-untyped]
from fsspec.registry import register_implementation  # type: ignore[import-untyped]

from aioflux import _bridge
from aioflux.errors import AlreadyExistsError, NotFoundError
from aioflux.integrations.fsspec._async_file import AsyncFile
from aioflux.integrations.fsspec._blocking import blocking
from aioflux.integrations.fsspec._compressed_file import CompressedFile
from aioflux.integrations.fsspec._options import FILE_CACHE_KEYWORDS
from aioflux.integrations.fsspec._read_file import ReadFile
from aioflux.integrations.fsspec._transfers import Moving
from aioflux.integrations.fsspec._write_file import TextFile, WriteFile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from aioflux.store import ObjectWriter, Store

__all__ = [
    "SCHEMES",
    "AiofluxFileSystem",
    "AzureFileSystem",
    "GSFileSystem",
    "LocalFileSystem",
    "MemoryFileSystem",
    "S3FileSystem",
    "register",
]

_BLOCK_BYTES = 4 * 1024 * 1024
_WRITING = ("wb", "xb", "ab")
_LABELS = ("content_type", "metadata")


@blocking("mv_file")
class AiofluxFileSystem(Moving):
    """Objects below one scheme as an fsspec filesystem, asynchronous and blocking.

    Blocking calls run on the background loop of aioflux: in notebooks, in threads, in forked
    children. Coroutines run on the loop that awaits them. A filesystem pickles with its options and
    without credentials.

    Objects appear whole or not at all: nothing is visible of a file before it is closed, and an
    exception in its `with` block stores nothing. Listings are not cached. Directories are what
    objects lie below: making one does nothing, and it is gone with its last object. An error of the
    service is raised by `exists`, `isdir` and `isfile`, too, and not taken for an absence.

    Args:
        asynchronous: Whether the user awaits the coroutines; makes no difference here.
        loop: Run blocking calls on this loop, which another thread runs.
        batch_size: Files that `put`, `get` and `copy` have under way at once, at most.
        storage_options: `credentials`, `endpoint_url`, `transfer`, `retry`, `timeouts`,
            `ssl_context` and `progress`, as `aioflux.open_store`; policies may be mappings.
            `default_block_size` is that of `open`. Options of gcsfs, s3fs and adlfs that name
            credentials, an endpoint or a region are taken for the scheme that they belong to, and
            those of their caches without effect: see docs/fsspec.md.

    Raises:
        TypeError: There is no such option with the scheme.
        ValueError: An option has no effect with the scheme.
    """

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

        Appending reads what is there and writes it anew; it fails where the object is replaced
        meanwhile.

        Args:
            path: The object.
            mode: How.
            block_size: Bytes that are asked for at once, at least, where a reader jumps; 1 MiB by
                default.
            cache_options: Without effect.
            compression: A name that fsspec knows, or "infer" for that of the name's ending.
            kwargs: `content_type` and `metadata` of what is written, and for text `encoding`,
                `errors` and `newline`. `cache_type`, `default_cache`, `fill_cache` and `size`, as
                files of gcsfs and s3fs take them, are without effect.

        Raises:
            TypeError: There is no such keyword.
            NotFoundError: There is no such object to be read.
            AlreadyExistsError: There is one that had to be new.
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
        place = self.object_place(path)
        store = self.store(place)
        if mode == "rb":
            meta = _bridge.run(store.head(place.key))
            size = block_size or self.default_block_size
            return ReadFile(self, place.base, store, meta, block_size=size)
        held = _bridge.Held(self._writing(store, place.key, mode, labels))
        uri = f"{place.store}{'' if place.store.endswith('/') else '/'}{place.key}"
        return WriteFile(self, place.path, uri, held, mode=mode, autocommit=autocommit)

    async def open_async(self, path: Any, mode: str = "rb", **kwargs: Any) -> AsyncFile:
        """Open an object as a file whose methods are awaited: "rb", "wb", "xb" or "ab".

        Outside of `async with`, `close` has to be awaited.
        """
        labels = {name: kwargs.pop(name) for name in _LABELS if name in kwargs}
        place = self.object_place(path)
        store = self.store(place)
        if mode == "rb":
            return await AsyncFile.opened(self, place.path, mode, store.open_reader(place.key))
        writer = self._writing(store, place.key, mode, labels)
        return await AsyncFile.opened(self, place.path, mode, writer)

    @staticmethod
    def _writing(
        store: Store, key: str, mode: str, labels: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[ObjectWriter]:
        if mode not in _WRITING:
            known = ", ".join(("rb", *_WRITING))
            raise ValueError(f"an object is opened as one of {known}, and as text, not {mode!r}")
        return {"wb": _overwriting, "xb": _creating, "ab": _appending}[mode](store, key, labels)

    async def _touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        """Write an empty object, or with `truncate=False` give what is there another time."""
        place = self.object_place(path)
        store = self.store(place)
        if not truncate:
            try:
                await store.copy(await store.head(place.key), place.key)
            except NotFoundError:
                await self._pipe_file(path, b"", mode="create")
            return
        await self._pipe_file(path, b"")


@asynccontextmanager
async def _overwriting(
    store: Store, key: str, labels: Mapping[str, Any]
) -> AsyncIterator[ObjectWriter]:
    async with store.open_writer(key, **labels) as writer:
        yield writer


@asynccontextmanager
async def _creating(
    store: Store, key: str, labels: Mapping[str, Any]
) -> AsyncIterator[ObjectWriter]:
    try:
        meta = await store.head(key)
    except NotFoundError:
        async with store.open_writer(key, mode="create", **labels) as writer:
            yield writer
        return
    raise AlreadyExistsError(f"there is an object {meta.uri} already", uri=meta.uri)


@asynccontextmanager
async def _appending(
    store: Store, key: str, labels: Mapping[str, Any]
) -> AsyncIterator[ObjectWriter]:
    try:
        meta = await store.head(key)
    except NotFoundError:
        async with store.open_writer(key, mode="create", **labels) as writer:
            yield writer
        return
    kept: dict[str, Any] = {
        "content_type": meta.content_type,
        "metadata": meta.metadata or None,
        **labels,
    }
    guard: dict[str, Any] = {"if_generation_match": meta.generation}
    async with store.open_writer(key, **guard, **kept) as writer:
        block = bytearray(min(meta.size, _BLOCK_BYTES))
        async with store.open_reader(meta) as reader:
            while num := await reader.readinto(block):
                await writer.write(memoryview(block)[:num])
        yield writer


class GSFileSystem(AiofluxFileSystem):
    """`aiogs://bucket/key`: Google Cloud Storage."""

    scheme = "gs"
    protocol = ("aiogs", "aioflux+gs", "gs", "gcs")


class S3FileSystem(AiofluxFileSystem):
    """`aios3://bucket/key`: S3, and what speaks as S3 does at an `endpoint_url`."""

    scheme = "s3"
    protocol = ("aios3", "aioflux+s3", "s3", "s3a")


class AzureFileSystem(AiofluxFileSystem):
    """`aioaz://account/container/key`: Azure Blob Storage."""

    scheme = "az"
    protocol = ("aioaz", "aioflux+az", "az")


class LocalFileSystem(AiofluxFileSystem):
    """`aiofile:///directory/key`: local files that appear whole, as objects do."""

    scheme = "file"
    protocol = ("aiofile", "aioflux+file", "file")
    root_marker = "/"


class MemoryFileSystem(AiofluxFileSystem):
    """`aiomemory://bucket/key`: objects in the memory of this process."""

    scheme = "memory"
    protocol = ("aiomemory", "aioflux+memory", "memory")


SCHEMES: dict[str, type[AiofluxFileSystem]] = {
    kind.scheme: kind
    for kind in (GSFileSystem, S3FileSystem, AzureFileSystem, LocalFileSystem, MemoryFileSystem)
}
"""Filesystem by scheme."""

_REPLACEABLE: dict[str, type[AiofluxFileSystem]] = {
    "gs": GSFileSystem,
    "gcs": GSFileSystem,
    "s3": S3FileSystem,
    "s3a": S3FileSystem,
    "az": AzureFileSystem,
}
"""Plain protocols that aioflux may take over; its `az` urls name the account first. `file` and
`memory` it may not: fsspec works with its own, whose directories exist by themselves."""


def register(*, replace: Sequence[str] = ()) -> None:
    """Register `aiogs`, `aios3`, `aioaz`, `aiofile` and `aiomemory` with fsspec.

    An installed aioflux is known to fsspec without this. `aioflux+gs` and the others with a `+` are
    registered, too, but libraries for which a scheme has letters and digits only see no url there.

    Args:
        replace: Plain protocols that are aioflux's from now on, of "gs", "gcs", "s3", "s3a" and
            "az": whatever opens `gs://` urls, say, through fsspec then uses it, in this process.

    Raises:
        TypeError: `replace` is one string.
        ValueError: A protocol cannot be taken over; nothing is registered then.
    """
    if isinstance(replace, str):
        raise TypeError(f'replace takes several protocols; write ("{replace}",)')
    unknown = [name for name in replace if name not in _REPLACEABLE]
    if unknown:
        known = ", ".join(_REPLACEABLE)
        raise ValueError(f"aioflux can take over {known}, not {unknown[0]!r}")
    for scheme, kind in SCHEMES.items():
        for name in (f"aio{scheme}", f"aioflux+{scheme}"):
            register_implementation(name, kind, clobber=True)
    for name in replace:
        register_implementation(name, _REPLACEABLE[name], clobber=True)
