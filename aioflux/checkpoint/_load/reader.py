"""open_reader: one object as a binary file, pinned to its generation at the time of opening.

torch.load(file) -> io.BufferedReader, 1 MiB: serves thousands of small reads with few crossings
                 -> _RawReader: large reads straight into the caller's memory, one crossing each
                 -> ObjectReader on the event loop: ranges prefetched in parallel, checksums

torch.load(file, mmap=True) -> MappedReader with a path -> MemoryFile: the whole object, verified
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, Unpack, overload

from aioflux import _bridge
from aioflux._transfer.prefault import populate
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._store.mapping import MemoryFile, read_into_memory
from aioflux.errors import StorageError
from aioflux.store import open_store

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectReader

_BUFFER_BYTES = 1024 * 1024
"""Buffer for small reads. A crossing costs 35-125 us, as much as copying 1 MiB."""
_MAX_READ_BYTES = 64 * 1024 * 1024
"""Bytes of one crossing. The `io.BufferedReader` repeats a read that returns fewer bytes."""


class _RawReader(io.RawIOBase):
    """The unbuffered file below a `CheckpointReader`."""

    def __init__(self, context: _bridge.OpenContext[ObjectReader]) -> None:
        self.meta = context.value.meta
        self.error: StorageError | None = None  # of the last read, if it failed
        self._context = context

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._context.value.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._context.value.seek(offset, whence)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        reader = self._context.value
        num_left = max(0, reader.meta.size - reader.tell())
        view = memoryview(buffer).cast("B")[: min(_MAX_READ_BYTES, num_left)]
        populate(view)  # in this thread, while the event loop receives
        self.error = None
        try:
            return _bridge.run(reader.readinto(view))
        except StorageError as exc:
            self.error = exc
            raise

    def readall(self) -> bytes:
        return _bridge.run(self._context.value.read())

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._context.exit()

    def __del__(self) -> None:
        """Do not close: any thread may run this. `OpenContext` closes on the event loop."""


class CheckpointReader(io.BufferedReader):
    """A readable and seekable file over one object.

    Reads return the generation that the object had when the file was opened. They raise
    NotFoundError if the object was deleted or replaced since. Ranges are prefetched in parallel,
    into at most `TransferOptions.max_buffered_bytes`; small reads need 1 MiB more. Once all bytes
    were read, in any order, their crc32c is compared with the object's.
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file. A failed read of `torch.load` is raised again: torch hides its error."""
        self.close()
        # torch calls `read` while the error is set. Then Python may raise any other error, such as
        # "object has no attribute 'read'" or "read of closed file".
        failure = self.raw.error
        if failure is not None and isinstance(error, Exception):
            cause: BaseException | None = error
            while cause is not None and cause is not failure:
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise failure from error

    def __repr__(self) -> str:
        return f"<CheckpointReader {self.uri}>"

    def __del__(self) -> None:
        """Do not close: any thread may run this. `OpenContext` closes on the event loop."""


class MappedReader(io.BufferedReader):
    """A file over a whole object in memory, verified. `open_reader(uri, mmap=True)` returns it.

    The file has a path, so that `torch.load(file, mmap=True)` and other callers can map it. The
    mappings share the memory of the file, and keep this memory when the file is closed.

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
        """Return a path that this process can open until the file is closed."""
        if self.closed:
            raise ValueError(f"cannot map {self.uri} through a closed file")
        return self._file.path

    def __repr__(self) -> str:
        return f"<MappedReader {self.uri}>"

    def close(self) -> None:
        """Release the memory, unless it is still mapped. A second call does nothing."""
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
        mmap: True reads the whole object now, in parallel ranges, verifies it, and returns a file
            with a path. Pass it to `torch.load(file, mmap=True)`, whose tensors share the memory of
            the file: 1.0 times the size of the object in total. (`torch.load(file)` copies it: 2.0
            times.) If the object is overwritten during the read, all of it is read again.
            False reads ranges on demand: opening costs one request, and `torch.load(file)` needs
            1.0 times the size of the object and `TransferOptions.max_buffered_bytes`. If the object
            is overwritten, the next read raises NotFoundError.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        NotFoundError: The object does not exist.
        ChecksumError: `mmap` is True, and the bytes do not match the checksum.
        ValueError: The uri names no object, or a setting has no effect with it.
    """
    root, key = split_object_uri(uri)
    if mmap:
        return MappedReader(*_bridge.run(read_into_memory(root, key, options, MemoryFile)))
    return CheckpointReader(
        _RawReader(_bridge.OpenContext(_reading(root, key, options))), _BUFFER_BYTES
    )


@asynccontextmanager
async def _reading(root: str, key: str, options: StoreOptions) -> AsyncIterator[ObjectReader]:
    async with open_store(root, **options) as store, store.open_reader(key) as reader:
        yield reader
