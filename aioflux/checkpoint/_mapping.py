"""A whole object in memory that has a path, so that what maps files can map it.

object -> ranges in parallel, straight into the mapping -> crc32c of the whole -> unmapped
       -> whoever asked maps it again, by its path: the same memory, no copy

The bytes are there once. Mapped twice at a time they would be counted twice as resident.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux._meta import ObjectMeta
    from aioflux._policy import StoreOptions

__all__ = ["MemoryFile", "fetch"]

_DIRECTORIES = ("/proc/self/fd", "/dev/fd")
"""Where open files have paths."""


class MemoryFile:
    """Memory of a fixed size with a path, of this process alone.

    On Linux it is a memfd, which lies on no disk and is not bound by the size of /dev/shm;
    elsewhere a temporary file, which has no name any more where open files have paths.

    Attributes:
        path: Where it is opened and mapped; of no use to other processes.
        fd: Its descriptor, which ends with the object, or with `close`.
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
            if num_bytes and is_on_disk and hasattr(os, "posix_fallocate"):
                # A disk without room would end the process where the mapping is written.
                os.posix_fallocate(self.fd, 0, num_bytes)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """Give its memory, writable, for the length of a `with` block."""
        if not self._num_bytes:
            yield memoryview(bytearray())
            return
        mapping = mmap.mmap(self.fd, self._num_bytes)
        view = memoryview(mapping)
        try:
            yield view
        finally:
            view.release()
            # What still refers to it, such as the traceback of an error, lets go of it later.
            with suppress(BufferError):
                mapping.close()

    def close(self) -> None:
        """Let go of the memory; what has mapped it keeps it. Closing twice does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._unlink()

    __del__ = close

    def _unlink(self) -> None:
        name, self._name = self._name, ""
        if name and self._pid == os.getpid():
            os.unlink(name)


def _open_memfd() -> int:
    """Return a descriptor, below 0 where there is none of this kind."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        return os.memfd_create("aioflux-checkpoint")
    except OSError:  # a sandbox that knows no such call
        return -1


def _path_of(fd: int) -> str:
    """Return the path of an open file, empty where the system has none."""
    paths = (f"{directory}/{fd}" for directory in _DIRECTORIES)
    return next((path for path in paths if os.path.exists(path)), "")


async def fetch(root: str, key: str, options: StoreOptions) -> tuple[ObjectMeta, MemoryFile]:
    """Read one generation of an object into memory, and verify all of it.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: Its bytes do not match its checksum, three times.
    """
    async with open_store(root, **options) as store:
        meta = await store.head(key)
        file = MemoryFile(meta.size)
        try:
            with file.mapped() as view:
                if view.nbytes:
                    await store.get_into(meta, view)
        except BaseException:
            file.close()
            raise
        return meta, file
