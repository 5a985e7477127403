"""load and open_reader: the value in an object that torch.save wrote, or the object as a file.

load                        -> PrivateMemory: the whole object, verified; tensors refer to it

open_reader: pinned to the generation of the object at the time of opening
torch.load(file)            -> io.BufferedReader, 1 MiB: serves small reads with few crossings
                            -> _RawReader: large reads straight into the caller's memory
                            -> ObjectReader on the event loop: ranges prefetched, checksums
torch.load(file, mmap=True) -> MappedReader with a path -> MemoryFile: the whole object, verified
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from inspect import signature
from typing import IO, TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from aioflux import _bridge
from aioflux._transfer.prefault import populate
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._format.commit import parse_step
from aioflux.checkpoint._format.tensor_zip import ZIP_MAGIC, compare_records, is_stored
from aioflux.checkpoint._require_torch import require_torch
from aioflux.checkpoint._store.objects import MemoryFile, PrivateMemory, read_into_memory
from aioflux.checkpoint._store.steps import COMMIT_KEYS
from aioflux.errors import AiofluxError, ChecksumError, NotFoundError, StorageError
from aioflux.options import TransferOptions
from aioflux.store import open_store

if TYPE_CHECKING:
    import mmap

    from _typeshed import WriteableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectReader

_BUFFER_BYTES = 1024 * 1024
"""Buffer for small reads. A crossing costs 35-125 us, as much as copying 1 MiB."""
_MAX_READ_BYTES = 64 * 1024 * 1024
"""Bytes of one crossing. The `io.BufferedReader` repeats a read that returns fewer bytes."""


def load(
    uri: str,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    mmap: bool = True,
    **options: Unpack[StoreOptions],
) -> Any:
    """Read an object that `torch.save` wrote, verify all of it, and return the saved value.

    Parallel ranges are read straight into the memory of the tensors, so that the load needs memory
    of 1.0 times the size of the object. If the object is overwritten during the read, all of it is
    read again; the result never mixes two versions. The bytes are verified before torch reads them,
    unless `transfer` has `verify=False`:

    * by the crc32c of the object, if the service stores it: on `gs://`; on `s3://` for objects that
      were uploaded with it; on `file://` for files that aioflux wrote on a file system with
      extended attributes, and that no other program changed or copied since;
    * otherwise by the CRC-32 of each record, which `torch.save` writes and torch.load does not
      compare (about 1 s for each GB);
    * otherwise by the transport alone, for example in the format before torch 1.6.

    Args:
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        map_location: Device of the tensors, as in `torch.load`.
        weights_only: Load tensors and plain values, and reject pickles that would run code. Then
            objects that others can write are safe to load. False runs any code in the pickle.
        mmap: Tensors share the memory that the object was read into. The memory is writable, and is
            freed when the last tensor is freed. With False, each tensor is copied to memory of its
            own, so that the load needs memory of 2.0 times the size of the object.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as for `aioflux.open_store`.

    Raises:
        NotFoundError: The object does not exist.
        ChecksumError: The bytes did not match the crc32c of the object in any of four reads, or a
            record does not match its CRC-32.
        PreconditionFailedError: The object was replaced during every attempt to read it.
        pickle.UnpicklingError: `weights_only` is True, and the pickle contains classes that are not
            allowed. An object that torch.save did not write raises this or another error of
            `torch.load`, with a note that names the uri.
        ValueError: The uri names no object, or a setting has no effect with it.
        ModuleNotFoundError: torch is not installed.
    """
    require_torch("aioflux.checkpoint.load")
    root, key = split_object_uri(uri)
    try:
        meta, memory = _bridge.run(read_into_memory(root, key, options, PrivateMemory))
    except NotFoundError as exc:
        if other := _bridge.run(_describe_prefix(uri, options)):
            raise NotFoundError(f"{uri} is {other}", uri=uri, status=exc.status) from exc
        raise
    verify = (options.get("transfer") or TransferOptions()).verify
    try:
        if verify and meta.crc32c is None:
            compare_records(memory.mapping, meta.uri)
        if not meta.size:
            raise EOFError(f"{meta.uri} is empty")  # noqa: TRY301  adds the note below
        return _load_mapping(memory.mapping, map_location, weights_only, by_reference=mmap)
    except ChecksumError:
        raise
    except Exception as exc:
        exc.add_note(f"while loading {meta.uri}, after all of its bytes were read")
        raise
    finally:
        memory.close()


async def _describe_prefix(uri: str, options: StoreOptions) -> str:
    """Describe the checkpoints below a uri, and how to load them; empty if there are none."""
    async with open_store(uri, **options) as store:
        with suppress(AiofluxError):
            listing = await store.list_all(delimiter="/")
            if any(parse_step(prefix) is not None for prefix in listing.prefixes):
                return f"a run of a Checkpointer, not an object: use Checkpointer({uri!r}).load()"
            if any(meta.key in COMMIT_KEYS for meta in listing):
                return (
                    "a distributed checkpoint, not an object: use "
                    f"aioflux.checkpoint.dcp.load_state({uri!r}), or for a step of a Checkpointer "
                    "its load(step=...)"
                )
    return ""


class _UnsupportedByReferenceError(Exception):
    """Tensors cannot share the memory: `torch.load` must load the value, or raise its own error."""


def _load_mapping(
    file: mmap.mmap, map_location: Any, weights_only: bool, *, by_reference: bool
) -> Any:
    import torch

    if by_reference and file[: len(ZIP_MAGIC)] == ZIP_MAGIC:
        with suppress(_UnsupportedByReferenceError):
            return _load_by_reference(file, map_location, weights_only)
        file.seek(0)
    # The format before torch 1.6 is not a zip archive, so torch always copies it.
    return torch.load(cast("IO[bytes]", file), map_location=map_location, weights_only=weights_only)


def _load_by_reference(file: mmap.mmap, map_location: Any, weights_only: bool) -> Any:
    """Load like `torch.load(path, mmap=True)`, but from memory that has no path.

    `torch.load` maps the file, and passes the mapping to `torch.serialization._load` (since torch
    2.1). This function passes the memory instead.

    Raises:
        _UnsupportedByReferenceError: This version of torch has no such function, the archive is
            TorchScript or compressed, or `torch.load` must raise its own error for the pickle.
    """
    import torch

    serialization: Any = torch.serialization
    try:
        is_plain = is_stored(cast("IO[bytes]", file), len(file))
    except (zipfile.BadZipFile, ValueError):
        is_plain = False
    file.seek(0)
    parameters = signature(serialization._load).parameters  # noqa: SLF001
    if not is_plain or "overall_storage" not in parameters:
        raise _UnsupportedByReferenceError
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower()
    is_restricted = weights_only or forced in {"1", "y", "yes", "true"}
    unpickler = torch._weights_only_unpickler if is_restricted else pickle  # noqa: SLF001
    # torch keeps a reference to the view, and the view keeps the mapping open.
    whole = torch.frombuffer(memoryview(file), dtype=torch.uint8)
    try:
        with serialization._open_zipfile_reader(file) as archive:  # noqa: SLF001
            if archive.has_record("constants.pkl"):  # TorchScript
                raise _UnsupportedByReferenceError
            return serialization._load(  # noqa: SLF001
                archive,
                map_location,
                unpickler,
                overall_storage=whole.untyped_storage(),
                encoding="utf-8",
            )
    except pickle.UnpicklingError as exc:
        if not is_restricted:
            raise
        raise _UnsupportedByReferenceError from exc  # no code in the pickle was run


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
