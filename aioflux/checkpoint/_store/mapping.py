"""A whole object in memory, in one copy: private, or under a path for callers that map files.

object -> ranges in parallel, straight into the mapping -> crc32c of the whole
       -> PrivateMemory: tensors refer to it
       -> MemoryFile: unmapped; the caller maps it again by its path: the same memory, no copy

Mapped twice at a time, the bytes of a `MemoryFile` would be counted twice as resident.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import tempfile
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._concurrency.run_to_completion import wait_until_done
from aioflux._transfer.retry import Backoff
from aioflux._values.checksums import address_of, combine_crc32c, crc32c
from aioflux.errors import NotFoundError, PreconditionFailedError
from aioflux.options import MIB, TransferOptions
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["MemoryFile", "PrivateMemory", "read_into_memory"]

_DIRECTORIES = ("/proc/self/fd", "/dev/fd")
"""Directories with a path for each open file."""
_RANGE_BYTES: Final = 8 * MIB
"""Bytes of a range, at most: the first is requested as soon as its memory is allocated."""
_MADV_POPULATE_WRITE: Final = 23
"""Since Linux 5.14 (madvise(2)); a kernel without it returns an error, and allocates by page."""

_madvise = ctypes.CDLL(None)["madvise"] if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PrivateMemory:
    """Memory of a fixed size, of this process alone.

    The kernel allocates 298 MB of it in 140 ms of CPU time; memory under a path takes 250, and 50
    more to be mapped again. Large pages took from 25 to 930, depending on the host of the virtual
    machine.

    Attributes:
        mapping: The memory, writable; it can be read as a file as well.
    """

    def __init__(self, num_bytes: int) -> None:
        self.mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        self._num_bytes = num_bytes

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """Return a context with a writable view of the memory."""
        with memoryview(self.mapping) as view, view[: self._num_bytes] as used:
            yield used

    def populate(self, view: memoryview, start: int, end: int) -> None:
        """Allocate the memory of a range of `view`, which is of `mapped`, at once."""
        _populate(view, start, end)

    def close(self) -> None:
        """Release the memory, unless tensors refer to it. Closing twice does nothing."""
        with suppress(BufferError):
            self.mapping.close()


class MemoryFile:
    """Memory of a fixed size with a path, of this process alone.

    On Linux it is a memfd, which is on no disk and is not limited by the size of /dev/shm;
    elsewhere a temporary file, which is unlinked if open files have paths.

    Attributes:
        path: Path to open and map it by, in this process.
        fd: Its descriptor, until `close`.
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
                # On a full disk a write to the mapping would end the process.
                self._allocate(0, num_bytes)
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
            # The traceback of an error may still refer to it.
            with suppress(BufferError):
                mapping.close()

    def populate(self, view: memoryview, start: int, end: int) -> None:
        """Allocate the memory of a range of `view`, which is of `mapped`, at once.

        Allocating the file before its mapping costs a third less than the mapping alone.
        """
        self._allocate(start, end)
        _populate(view, start, end)

    def close(self) -> None:
        """Release the memory, except for other mappings of it. Closing twice does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._unlink()

    __del__ = close

    def _allocate(self, start: int, end: int) -> None:
        if end > start and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, start, end - start)

    def _unlink(self) -> None:
        name, self._name = self._name, ""
        if name and self._pid == os.getpid():
            os.unlink(name)


Memory = TypeVar("Memory", PrivateMemory, MemoryFile)


def _populate(view: memoryview, start: int, end: int) -> None:
    if _madvise is not None:
        with address_of(view) as begin:
            _madvise(begin + start, end - start, _MADV_POPULATE_WRITE)


def _open_memfd() -> int:
    """Return the descriptor of a memfd, or -1 if there are none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        return os.memfd_create("aioflux-checkpoint")
    except OSError:  # a sandbox without this system call
        return -1


def _path_of(fd: int) -> str:
    """Return the path of an open file, or nothing if the system has none."""
    paths = (f"{directory}/{fd}" for directory in _DIRECTORIES)
    return next((path for path in paths if os.path.exists(path)), "")


async def read_into_memory(
    root: str, key: str, options: StoreOptions, kind: type[Memory]
) -> tuple[ObjectMeta, Memory]:
    """Read one generation of an object into memory of a kind, and verify all of it.

    An object that is replaced meanwhile is read again after a pause, as by `Store.get`.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: Its bytes do not match its checksum, three times.
        PreconditionFailedError: It was replaced in each read until the retry policy ended.
    """
    # The checksum of the whole object is compared here, so that ranges need no verification.
    transfer = options.get("transfer") or TransferOptions()
    plain: StoreOptions = {**options, "transfer": replace(transfer, verify=False)}
    async with open_store(root, **plain) as store:
        backoff = Backoff(store.retry)
        while True:
            meta = await store.head(key)
            try:
                return meta, await _read_generation(store, root, meta, options, kind)
            except (NotFoundError, PreconditionFailedError):
                newer = await store.head(key)
                if (newer.generation, newer.etag) == (meta.generation, meta.etag):
                    raise
            if not await backoff.pause():
                raise PreconditionFailedError(
                    f"could not read {meta.uri}: it was replaced while it was read, "
                    f"{backoff.num_tries} times in a row; load an object that is replaced less "
                    "often",
                    uri=meta.uri,
                )


async def _read_generation(
    store: Store, root: str, meta: ObjectMeta, options: StoreOptions, kind: type[Memory]
) -> Memory:
    """Read one generation by a store without verification, and verify all of it.

    An object whose checksum the service does not know is read by another store of `options`.
    """
    is_hashed = (options.get("transfer") or TransferOptions()).verify
    memory = kind(meta.size)
    try:
        with memory.mapped() as view:
            is_right = False
            if meta.crc32c is not None or not is_hashed:
                checksum = await _fill(store, meta, memory, view, is_hashed=is_hashed)
                is_right = not is_hashed or checksum == meta.crc32c
            if not is_right:
                async with open_store(root, **options) as other:
                    await other.get_into(meta, view)
    except BaseException:
        memory.close()
        raise
    return memory


async def _fill(
    store: Store,
    meta: ObjectMeta,
    memory: PrivateMemory | MemoryFile,
    view: memoryview,
    *,
    is_hashed: bool,
) -> int:
    """Read an object into memory range by range, and return its crc32c, or 0 if not `is_hashed`.

    A range is requested as soon as a thread has allocated its memory: the event loop would take as
    long for that as for the bytes.
    """
    step = min(store.transfer.range_size_bytes, _RANGE_BYTES)
    plan = [(start, min(start + step, meta.size)) for start in range(0, meta.size, step)]

    async def read(start: int, end: int) -> int:
        await store.get_into(meta, view[start:end], start=start)
        return crc32c(view[start:end]) if is_hashed else 0

    reads = []
    try:
        async with asyncio.TaskGroup() as group, aclosing(_populated(memory, view, plan)) as pieces:
            async for start, end in pieces:
                reads.append(group.create_task(read(start, end)))
    except BaseExceptionGroup as failed:
        error = failed.exceptions[0]
        raise error from error.__cause__
    checksum = 0
    for (start, end), task in zip(plan, reads, strict=True):
        checksum = combine_crc32c(checksum, task.result(), end - start)
    return checksum


async def _populated(
    memory: PrivateMemory | MemoryFile, view: memoryview, plan: Sequence[tuple[int, int]]
) -> AsyncGenerator[tuple[int, int], None]:
    """Yield each range of `plan` once a thread has allocated its memory."""
    loop = asyncio.get_running_loop()
    populated: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
    is_over = False

    def populate() -> None:
        try:
            for start, end in plan:
                if is_over:
                    return
                memory.populate(view, start, end)
                loop.call_soon_threadsafe(populated.put_nowait, (start, end))
        finally:
            loop.call_soon_threadsafe(populated.put_nowait, None)

    thread = asyncio.ensure_future(asyncio.to_thread(populate))
    try:
        while (piece := await populated.get()) is not None:
            yield piece
        await asyncio.shield(thread)
    finally:
        is_over = True
        # The memory must outlive the thread, also if the caller is cancelled.
        await wait_until_done(thread)
        thread.exception()  # raised above, unless something else was first
