"""A whole object in memory, read without a copy: private memory, or memory with a path.

    object -> ranges in parallel, straight into the mapping -> compare crc32c of the object
    -> PrivateMemory: tensors refer to the mapping
    -> MemoryFile: unmapped; the caller maps the same memory again by its path, without a copy

A `MemoryFile` is unmapped after the read, because memory that is mapped twice counts twice in the
resident size of the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._concurrency.run_to_completion import wait_until_done
from aioflux._values.checksums import address_of, combine_crc32c
from aioflux.options import MIB
from aioflux.store import count_mismatch, open_store, read_current, read_hashed

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_DIRECTORIES = ("/proc/self/fd", "/dev/fd")
"""Directories with a path for each open descriptor of this process."""
_RANGE_BYTES: Final = 8 * MIB
"""Maximum size of a range. Each request waits until the memory of its range is allocated, so
smaller ranges start earlier."""
_MADV_POPULATE_WRITE: Final = 23
"""Allocates memory at once, since Linux 5.14 (madvise(2)). An older kernel returns an error, which
is ignored: it allocates each page at the first write to the page."""

_madvise = ctypes.CDLL(None)["madvise"] if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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

    def populate(self, view: memoryview, start: int, end: int) -> None:
        """Allocate the memory of a range now; `view` is the view that `mapped` returned."""
        populate(view, start, end)

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
            # The traceback of an error may still refer to a view of the mapping.
            with suppress(BufferError):
                mapping.close()

    def populate(self, view: memoryview, start: int, end: int) -> None:
        """Allocate the memory of a range now; `view` is the view that `mapped` returned.

        Allocating in the file first takes a third less time than populating the mapping alone.
        """
        self._allocate(start, end)
        populate(view, start, end)

    def close(self) -> None:
        """Close the descriptor. Other mappings of the memory stay. A second call does nothing."""
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


def populate(view: memoryview, start: int, end: int) -> None:
    """Allocate the memory of `view[start:end]` now, without the GIL, on Linux 5.14 and later."""
    if _madvise is not None:
        with address_of(view) as begin:
            first = (begin + start) & -mmap.PAGESIZE
            _madvise(first, begin + end - first, _MADV_POPULATE_WRITE)


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
        ChecksumError: The bytes did not match the checksum of the object in any of four reads.
        PreconditionFailedError: The object was replaced in each attempt of the retry policy.
    """
    async with open_store(root, **options) as store:

        async def read(meta: ObjectMeta) -> tuple[ObjectMeta, Memory]:
            return meta, await _read_generation(store, meta, kind)

        return await read_current(store, key, read)


async def _read_generation(store: Store, meta: ObjectMeta, kind: type[Memory]) -> Memory:
    """Read one generation, and verify the whole object.

    If the service reports no crc32c, or it does not match, `get_into` reads the object.
    """
    is_hashed = store.transfer.verify
    memory = kind(meta.size)
    try:
        with memory.mapped() as view:
            is_valid = False
            if meta.crc32c is not None or not is_hashed:
                checksum = await _fill(store, meta, memory, view)
                is_valid = not is_hashed or checksum == meta.crc32c
                if not is_valid:
                    count_mismatch(store, meta, "they do not match the checksum of the object")
            if not is_valid:
                await store.get_into(meta, view)
    except BaseException:
        memory.close()
        raise
    return memory


async def _fill(
    store: Store, meta: ObjectMeta, memory: PrivateMemory | MemoryFile, view: memoryview
) -> int:
    """Read an object into memory range by range, and return its crc32c; 0 if verify is off.

    A thread allocates the memory of each range before its request is sent: on the event loop the
    allocation would take as long as receiving the bytes.
    """
    step = min(store.transfer.range_size_bytes, _RANGE_BYTES)
    plan = [(start, min(start + step, meta.size)) for start in range(0, meta.size, step)]
    reads = []
    try:
        populating = _populate_ranges(memory, view, plan)
        async with asyncio.TaskGroup() as group, aclosing(populating) as populated:
            async for start, end in populated:
                reading = read_hashed(store, meta, view[start:end], start=start)
                reads.append(group.create_task(reading))
    except BaseExceptionGroup as failed:
        error = failed.exceptions[0]
        raise error from error.__cause__
    checksum = 0
    for (start, end), task in zip(plan, reads, strict=True):
        checksum = combine_crc32c(checksum, task.result(), end - start)
    return checksum


async def _populate_ranges(
    memory: PrivateMemory | MemoryFile, view: memoryview, plan: Sequence[tuple[int, int]]
) -> AsyncGenerator[tuple[int, int], None]:
    """Yield each range of `plan` once a thread has allocated its memory."""
    loop = asyncio.get_running_loop()
    populated: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
    is_cancelled = False

    def populate() -> None:
        try:
            for start, end in plan:
                if is_cancelled:
                    return
                memory.populate(view, start, end)
                loop.call_soon_threadsafe(populated.put_nowait, (start, end))
        finally:
            loop.call_soon_threadsafe(populated.put_nowait, None)

    thread = asyncio.ensure_future(asyncio.to_thread(populate))
    try:
        while (populated_range := await populated.get()) is not None:
            yield populated_range
        await asyncio.shield(thread)
    finally:
        is_cancelled = True
        # The memory must stay allocated until the thread returns, also after a cancellation.
        await wait_until_done(thread)
        thread.exception()  # marks the error as retrieved; the shield above raises it
