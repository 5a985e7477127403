"""A whole object in memory, read without a copy: private memory, or memory with a path.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from aioflux.store import open_store, read_current

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions

_DIRECTORIES = ("/proc/self/fd", "/dev/fd")
"""Directories with a path for each open descriptor of this process."""


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
