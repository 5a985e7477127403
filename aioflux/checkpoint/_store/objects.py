"""Objects with tensors: written and read without copies, verified.

Data objects of a checkpoint:

write: pieces in memory -> zero-copy writer -> compare the service's crc32c with the blocks'
read:  range, extended to whole blocks -> compare crc32c of each block -> caller's memory

A whole object, into private memory or memory with a path:

    object -> ranges in parallel, straight into the mapping -> compare crc32c of the object
    -> PrivateMemory: tensors refer to the mapping
    -> MemoryFile: unmapped; the caller maps the same memory again by its path, without a copy

A `MemoryFile` is unmapped after the read, because memory that is mapped twice counts twice in the
resident size of the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._values.meta import ObjectMeta
from aioflux.checkpoint._format.commit import (
    BlockDigest,
    StoredObject,
    joined_blocks,
    plan_block_size,
    verify_blocks,
)
from aioflux.checkpoint._store.steps import uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
)
from aioflux.store import count_mismatch, open_store, read_current, read_hashed

if TYPE_CHECKING:
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_SLICE_BYTES: Final = 16 * 1024 * 1024
"""Size of the pieces that are hashed between two awaits. Each piece blocks the event loop for
1-2 ms."""

_MAX_READS: Final = 3
"""Maximum number of reads of a range in which a block does not match: the transfer may have damaged
the bytes."""

_DIRECTORIES = ("/proc/self/fd", "/dev/fd")
"""Directories with a path for each open descriptor of this process."""


async def write_object(
    store: Store,
    key: str,
    segments: Iterable[bytes | memoryview] | AsyncIterable[bytes | memoryview],
    *,
    rank: int = 0,
    size_hint: int = 0,
    progress: Callable[[int], None] | None = None,
) -> StoredObject:
    """Write one data object, and return its description for the commit, without items.

    Args:
        store: The store.
        key: Unique key of the object in the store.
        segments: The bytes of the object, in order. The memory is sent without a copy and must not
            change until this returns.
        rank: Rank that writes the object.
        size_hint: Approximate size of the object in bytes, which decides the size of its blocks.
        progress: Called after each write, with the number of bytes written.

    Raises:
        StorageError: The object could not be written; nothing is visible.
        ChecksumError: The service stored other bytes than were sent.
    """
    digest = BlockDigest(plan_block_size(size_hint))
    async with store.open_writer(key, zero_copy=True) as writer:
        async for view in _slices(segments):
            digest.update(view)
            await writer.write(view)
            if progress is not None:
                progress(view.nbytes)
    return stored_object(writer.meta, digest, key=key, size=digest.size, rank=rank)


def stored_object(
    meta: ObjectMeta, digest: BlockDigest, *, key: str, size: int, rank: int
) -> StoredObject:
    """Return the description of a written object for the commit, without items.

    Raises:
        ChecksumError: The object does not have this size, or the crc32c of `digest`.
    """
    whole, blocks = digest.finish()
    if meta.size != size or meta.crc32c not in {None, whole}:
        raise ChecksumError(
            f"could not write {meta.uri}: {size} bytes with crc32c {whole} were sent, but "
            f"the stored object has {meta.size} bytes and crc32c {meta.crc32c}; save again",
            uri=meta.uri,
        )
    return StoredObject(
        key=key,
        size=size,
        crc32c=whole,
        generation=meta.generation,
        rank=rank,
        block_size=digest.block_size,
        block_crcs=blocks,
    )


async def _slices(
    segments: Iterable[bytes | memoryview] | AsyncIterable[bytes | memoryview],
) -> AsyncIterator[memoryview]:
    if not hasattr(segments, "__aiter__"):
        for piece in chain.from_iterable(map(_cut, segments)):
            yield piece
        return
    async for segment in segments:
        for piece in _cut(segment):
            yield piece


def _cut(segment: bytes | memoryview) -> Iterable[memoryview]:
    view = memoryview(segment).cast("B")
    return (view[start : start + _SLICE_BYTES] for start in range(0, view.nbytes, _SLICE_BYTES))


def meta_of(
    store: Store, stored: StoredObject, *, key: str = "", is_pinned: bool = True
) -> ObjectMeta:
    """Return metadata to read a data object, with the generation in the commit if `is_pinned`."""
    key = key or stored.key
    generation = stored.generation if is_pinned else ""
    return ObjectMeta(key=key, uri=uri_below(store, key), size=stored.size, generation=generation)


async def read_range(
    store: Store,
    stored: StoredObject,
    *,
    start: int,
    into: memoryview,
    key: str = "",
    is_pinned: bool = True,
) -> None:
    """Read a range of a data object into memory, and verify it.

    A range of whole blocks is read straight into `into`. Any other range is extended to whole
    blocks, by up to two blocks, and copied.

    Args:
        store: The store.
        stored: Description of the object in the commit.
        start: Offset of the first byte in the object.
        into: Memory to fill.
        key: Key of the object in the store; `stored.key` by default.
        is_pinned: Read only the generation that the commit lists.

    Raises:
        CheckpointCorruptError: The object was deleted, replaced or truncated, or its bytes do not
            match the checksums of the commit.
    """
    end = start + into.nbytes
    if start == end:
        return
    block = stored.block_size
    meta = meta_of(store, stored, key=key, is_pinned=is_pinned)
    if start < 0 or end > stored.size:
        raise CheckpointCorruptError(
            f"cannot read bytes [{start}, {end}) of {meta.uri}: the commit lists this object with "
            f"{stored.size} bytes, so the commit contradicts itself; load an earlier checkpoint"
        )
    blocks_start, blocks_end = start - start % block, min(stored.size, -(-end // block) * block)
    if (blocks_start, blocks_end) == (start, end):
        await _read_blocks(store, stored, meta, start, into)
        return
    blocks = memoryview(bytearray(blocks_end - blocks_start))
    await _read_blocks(store, stored, meta, blocks_start, blocks)
    into[:] = blocks[start - blocks_start : end - blocks_start]


async def _read_blocks(
    store: Store, stored: StoredObject, meta: ObjectMeta, start: int, into: memoryview
) -> None:
    damaged_block = 0
    num_read = into.nbytes
    is_hashed = meta.generation and store.transfer.verify
    for number in range(_MAX_READS):
        if number:
            count_mismatch(store, meta, "they do not match the checksums of the commit")
        try:
            if is_hashed:
                checksum = await read_hashed(store, meta, into, start=start)
                if checksum == joined_blocks(stored, start, into.nbytes):
                    return
            else:
                num_read = await store.get_into(
                    meta if meta.generation else meta.key, into, start=start
                )
        except ChecksumError as exc:
            raise CheckpointCorruptError(
                f"{meta.uri} is damaged: {exc}; load an earlier checkpoint"
            ) from exc
        except (NotFoundError, PreconditionFailedError) as exc:
            raise CheckpointCorruptError(
                f"{meta.uri} was deleted or replaced since it was saved (generation "
                f"{meta.generation or 'unknown'}); load an earlier checkpoint"
            ) from exc
        if num_read < into.nbytes:
            raise CheckpointCorruptError(
                f"{meta.uri} is truncated: it ends at byte {start + num_read} of {stored.size}; "
                "load an earlier checkpoint"
            )
        mismatch = verify_blocks(stored, start, into)
        if mismatch is None:
            return
        damaged_block = mismatch
    first = damaged_block * stored.block_size
    last = min(first + stored.block_size, stored.size)
    raise CheckpointCorruptError(
        f"{meta.uri} is damaged: {_MAX_READS} reads returned bytes that are not those that were "
        f"saved, the last read in the block [{first}, {last}); load an earlier checkpoint"
    )


class PrivateMemory:
    """Memory of a fixed size, private to this process.

    The kernel allocates 298 MB of private memory in 140 ms of CPU time. Memory with a path takes
    250 ms, and 50 ms to map it again. Huge pages took 25 to 930 ms on different virtual machines,
    and are not used.

    Attributes:
        mapping: The writable memory, which also has the methods of a file.
    """

    def __init__(self, num_bytes: int) -> None:
        self.mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        self._num_bytes = num_bytes

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """Return a context with a writable view of the memory."""
        with memoryview(self.mapping) as view, view[: self._num_bytes] as used:
            yield used

    def close(self) -> None:
        """Release the memory, unless tensors refer to it. A second call does nothing."""
        with suppress(BufferError):
            self.mapping.close()


class MemoryFile:
    """Memory of a fixed size with a path, for libraries that open files.

    On Linux the memory is a memfd, which uses no disk and is not limited by the size of /dev/shm.
    On other systems it is a temporary file, which is unlinked at once if its descriptor has a path.

    Attributes:
        path: Path that opens the memory, in this process only.
        fd: Descriptor of the memory; -1 after `close`.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pid = os.getpid()
        self._name = ""
        self._num_bytes = num_bytes
        self.fd = _open_memfd()
        is_on_disk = self.fd < 0
        if is_on_disk:
            self.fd, self._name = tempfile.mkstemp(prefix="aioflux-checkpoint-")
        try:
            self.path = _path_of(self.fd)
            if self.path and is_on_disk:
                self._unlink()
            self.path = self.path or self._name
            os.ftruncate(self.fd, num_bytes)
            if is_on_disk:
                # On a full disk a write to the mapping would kill the process by SIGBUS.
                os.posix_fallocate(self.fd, 0, num_bytes)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """See `PrivateMemory.mapped`."""
        if not self._num_bytes:
            yield memoryview(bytearray())
            return
        mapping = mmap.mmap(self.fd, self._num_bytes)
        view = memoryview(mapping)
        try:
            yield view
        finally:
            view.release()
            # The traceback of an error may still refer to a view of the mapping.
            with suppress(BufferError):
                mapping.close()

    def close(self) -> None:
        """Close the descriptor. Other mappings of the memory stay. A second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._unlink()

    __del__ = close

    def _unlink(self) -> None:
        name, self._name = self._name, ""
        if name and self._pid == os.getpid():
            os.unlink(name)


Memory = TypeVar("Memory", PrivateMemory, MemoryFile)


def _open_memfd() -> int:
    """Return the descriptor of a new memfd, or -1 if the system supports none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        return os.memfd_create("aioflux-checkpoint")
    except OSError:  # a sandbox may forbid the system call
        return -1


def _path_of(fd: int) -> str:
    """Return the path of a descriptor, or an empty string if the system has no such paths."""
    paths = (f"{directory}/{fd}" for directory in _DIRECTORIES)
    return next((path for path in paths if os.path.exists(path)), "")


async def read_into_memory(
    root: str, key: str, options: StoreOptions, kind: type[Memory]
) -> tuple[ObjectMeta, Memory]:
    """Read one generation of an object into a new instance of `kind`, and verify all of it.

    If the object is replaced during the read, the newer generation is read after a pause.

    Raises:
        NotFoundError: The object does not exist.
        ChecksumError: The bytes did not match the checksum of the object in any of three reads.
        PreconditionFailedError: The object was replaced in each attempt of the retry policy.
    """
    async with open_store(root, **options) as store:

        async def read(meta: ObjectMeta) -> tuple[ObjectMeta, Memory]:
            memory = kind(meta.size)
            try:
                with memory.mapped() as view:
                    await store.get_into(meta, view)
            except BaseException:
                memory.close()
                raise
            return meta, memory

        return await read_current(store, key, read)
