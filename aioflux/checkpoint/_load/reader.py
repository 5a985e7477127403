"""Readers: one object as a binary file, pinned to its generation when it is opened.

torch.load(file) -> io.BufferedReader, 1 MiB: thousands of small reads without a crossing each
                 -> _RawReader: large reads straight into the caller's memory, one crossing each
                 -> ObjectReader on the event loop: ranges prefetched in parallel, checksums

torch.load(file, mmap=True) -> MappedReader with a path -> MemoryFile: the whole object, verified
"""

from __future__ import annotations

import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, overload

from aioflux import _bridge
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._store.mapping import MemoryFile, read_into_memory
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Unpack

    from _typeshed import WriteableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectReader

__all__ = ["CheckpointReader", "MappedReader", "open_reader"]

_BUFFER_BYTES = 1024 * 1024
"""Bytes of one crossing for small reads: it costs 35-125 us, as much as copying 1 MiB."""


class _RawReader(io.RawIOBase):
    """The unbuffered file below a `CheckpointReader`."""

    def __init__(self, held: _bridge.Held[ObjectReader]) -> None:
        self.meta = held.value.meta
        self._held = held

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._held.value.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._held.value.seek(offset, whence)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        return _bridge.run(self._held.value.readinto(memoryview(buffer).cast("B")))

    def readall(self) -> bytes:
        return _bridge.run(self._held.value.read())

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._held.leave()

    def __del__(self) -> None:
        """Do not close: `Held` does so on the event loop, and this may be any thread."""


class CheckpointReader(io.BufferedReader):
    """A readable and seekable file over one object.

    Reads return the generation that the object had when it was opened; they raise NotFoundError if
    it was deleted or replaced since. Ranges are prefetched in parallel; memory is bounded by
    `TransferOptions.max_buffered_bytes` and 1 MiB. Once all bytes were read, in any order, their
    crc32c is compared with the object's.
    """

    raw: _RawReader

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the object."""
        return self.raw.meta

    @property
    def uri(self) -> str:
        """Whole uri of the object."""
        return self.meta.uri

    def __repr__(self) -> str:
        return f"<CheckpointReader {self.uri}>"

    def __del__(self) -> None:
        """Do not close: `Held` does so on the event loop, and this may be any thread."""


class MappedReader(io.BufferedReader):
    """A file over a whole object, in memory and verified: `open_reader(uri, mmap=True)`.

    It has a path, for `torch.load(file, mmap=True)` and other callers that map files: their
    mappings share its memory, and keep it when the file is closed.

    Attributes:
        meta: Metadata of the object.
    """

    def __init__(self, meta: ObjectMeta, file: MemoryFile) -> None:
        self.meta = meta
        self._file = file
        super().__init__(io.FileIO(file.fd, "rb", closefd=False), _BUFFER_BYTES)

    @property
    def uri(self) -> str:
        """Whole uri of the object."""
        return self.meta.uri

    def __fspath__(self) -> str:
        """Return the path, which this process can open until the file is closed."""
        if self.closed:
            raise ValueError(f"{self.uri} is read through a closed file")
        return self._file.path

    def __repr__(self) -> str:
        return f"<MappedReader {self.uri}>"

    def close(self) -> None:
        """Release the memory, except for mappings of it. Closing twice does nothing."""
        super().close()
        self._file.close()


@overload
def open_reader(
    uri: str, *, mmap: Literal[False] = False, **options: Unpack[StoreOptions]
) -> CheckpointReader: ...
@overload
def open_reader(
    uri: str, *, mmap: Literal[True], **options: Unpack[StoreOptions]
) -> MappedReader: ...
def open_reader(
    uri: str, *, mmap: bool = False, **options: Unpack[StoreOptions]
) -> CheckpointReader | MappedReader:
    """Open one object for reading, for `torch.load(file)`.

    Args:
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        mmap: Read all of it now, in parallel ranges, verify it, and give the file a path, for
            `torch.load(file, mmap=True)`, whose tensors refer to the same memory: 1.0 times the
            object in all. `torch.load(file)` would copy it, to 2.0 times; without `mmap` it needs
            1.0 times the object and `TransferOptions.max_buffered_bytes`, and opening costs one
            request. If the object is overwritten while it is read, `mmap` reads it again from the
            start; without `mmap` the next read raises NotFoundError.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: With `mmap`: the bytes do not match the checksum.
        ValueError: The uri names no object, or a setting has no effect with it.
    """
    root, key = split_object_uri(uri)
    if mmap:
        return MappedReader(*_bridge.run(read_into_memory(root, key, options, MemoryFile)))
    return CheckpointReader(_RawReader(_bridge.Held(_reading(root, key, options))), _BUFFER_BYTES)


@asynccontextmanager
async def _reading(root: str, key: str, options: StoreOptions) -> AsyncIterator[ObjectReader]:
    async with open_store(root, **options) as store, store.open_reader(key) as reader:
        yield reader
