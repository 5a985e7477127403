"""Readable files of fsspec, pinned to the generation that the object has when it is opened.

    object <= 4 MiB    read whole by the first read, unless that is a `read()` after a seek
    sequential reads   streamed: ranges are prefetched in parallel
    read after a seek  exactly the bytes of the read, in one request or in parallel ranges
    read >= 64 MiB     the same as after a seek

A read below `block_size` (1 MiB by default) fetches `block_size` bytes, for later reads, too.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from aioflux import _bridge
from aioflux._files import PositionedFile
from aioflux.integrations.fsspec._entries import Entry, object_entry

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import ObjectReader, Store

DEFAULT_BLOCK_BYTES = 1024 * 1024
"""Bytes that a small read fetches in one crossing to the event loop. A crossing costs 35-125 us, as
much as a copy of 1 MiB."""

_WHOLE_BYTES = 4 * 1024 * 1024
"""Objects up to this size are read whole, which takes as long as two round trips to a service."""

_MIN_SEQUENTIAL = 3
"""The object is streamed from this number of consecutive sequential reads on."""

_DIRECT_BYTES = 64 * 1024 * 1024
"""Reads of at least this size are not streamed. One such read already has enough parallel ranges,
and writes them directly to the caller's memory."""

_GAP_BYTES = 64 * 1024
"""Longest forward seek between two sequential reads. torch.load skips the headers and padding of a
zip file by such seeks."""


class SequentialReads:
    """Detection of sequential reads, to decide whether to stream an object. Pure."""

    def __init__(self) -> None:
        self._next = 0
        # A first read at the beginning of the file counts as sequential.
        self._num = _MIN_SEQUENTIAL - 1

    def add(self, start: int, end: int) -> bool:
        """Count a read of the bytes `[start, end)`, and return whether to stream it."""
        self._num = self._num + 1 if 0 <= start - self._next <= _GAP_BYTES else 1
        self._next = end
        return self._num >= _MIN_SEQUENTIAL


class _RawFile(PositionedFile):
    """The unbuffered file below a `ReadFile`."""

    def __init__(self, store: Store, meta: ObjectMeta) -> None:
        super().__init__(meta)
        self.store = store
        self._whole: bytes | None = None
        self._sequential = SequentialReads()
        # fsspec's `blockcache` sets a cache of blocks on disk here, which then serves all reads.
        self.cache: Any = None
        self._context: _bridge.OpenContext[ObjectReader] | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        start = self._position
        end = min(start + view.nbytes, self.meta.size)
        if end <= start:
            return 0
        view = view[: end - start]
        if self.cache is not None:
            view[:] = self.cache._fetch(start, end)  # noqa: SLF001  # as fsspec's own files do
            self._position = end
            return end - start
        if self._whole is None and self.meta.size <= _WHOLE_BYTES:
            self._whole = _bridge.run(self.store.get(self.meta))
        if self._whole is not None:
            view[:] = memoryview(self._whole)[start:end]
        elif self._sequential.add(start, end) and view.nbytes < _DIRECT_BYTES:
            reader = self._reader()
            reader.seek(start)
            _bridge.run(reader.readinto(view))
        else:
            _bridge.run(self.store.get_into(self.meta, view, start=start))
        self._position = end
        return end - start

    def readall(self) -> bytes:
        start, size = self._position, self.meta.size
        if start >= size:
            return b""
        if self.cache is not None:
            data = bytes(self.cache._fetch(start, size))  # noqa: SLF001  # as fsspec's own files do
        elif self._whole is not None:
            data = self._whole[start:]
        elif start:
            data = _bridge.run(self.store.get_range(self.meta, start=start, end=size))
        else:
            data = _bridge.run(self.store.get(self.meta))
        self._position = size
        return data

    def _reader(self) -> ObjectReader:
        if self._context is None:
            self._context = _bridge.OpenContext(self.store.open_reader(self.meta))
        return self._context.value

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._whole = None
        if self._context is not None:
            self._context.exit()

    def __del__(self) -> None:
        """Do nothing: any thread may run this. `OpenContext` closes the reader."""


class ReadFile(io.BufferedReader):
    """Readable and seekable file, returned by `AiofluxFileSystem.open(path, "rb")`.

    Reads return bytes of the generation that the object had when the file was opened. A read that
    sends a request raises NotFoundError if the object was deleted or replaced. Bytes are verified
    as in `Store.get_into` and `Store.open_reader`.
    """

    raw: _RawFile
    mode = "rb"

    def __init__(
        self, system: Any, base: str, store: Store, meta: ObjectMeta, *, block_size: int | None
    ) -> None:
        self.blocksize = block_size or DEFAULT_BLOCK_BYTES
        super().__init__(_RawFile(store, meta), self.blocksize)
        self.fs = system
        self.details = object_entry(base, meta)
        self.path: str = self.details["name"]
        self.size = meta.size

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        name: str = self.fs.unstrip_protocol(self.path)
        return name

    @property
    def cache(self) -> Any:
        """The cache of fsspec that serves all reads; None by default."""
        return self.raw.cache

    @cache.setter
    def cache(self, value: Any) -> None:
        self.raw.cache = value

    @property
    def closed(self) -> bool:
        """Return whether the file is closed. fsspec's `blockcache` sets True to close it."""
        return self.raw.closed

    @closed.setter
    def closed(self, value: bool) -> None:
        if value:
            self.close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Read the bytes `[start, end)` of the opened generation; called by caches of fsspec."""
        end = min(end, self.size)
        if end <= start:
            return b""
        return _bridge.run(self.raw.store.get_range(self.raw.meta, start=start, end=end))

    @property
    def loc(self) -> int:
        """Position of the next read."""
        return self.tell()

    def info(self) -> Entry:
        """Return the object's entry from the time when the file was opened."""
        return self.details

    def __repr__(self) -> str:
        return f"<ReadFile {self.raw.meta.uri}>"

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled; pickle the OpenFile that fsspec.open returns")

    def __del__(self) -> None:
        """Do nothing: any thread may run this. `OpenContext` closes the reader."""
