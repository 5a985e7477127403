"""Bytes of objects in files: one file for each leaf, unchanged once a record refers to it."""

from __future__ import annotations

import mmap
import os
import shutil
import uuid
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._blobs import Blob, Blobs, JoinedBlob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from aioflux.testing.gcs_server._messages import Buffer

_MAPPED_BYTES = 1024 * 1024
"""Size from which on a mapping is cheaper than a copy."""


class FileBlob(Blob):
    """Bytes in a file, which belongs to this blob."""

    __slots__ = ("path", "size")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    def view(self, start: int, end: int) -> Buffer:
        """See base class; a mapping outlives its file's name."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if end - start < _MAPPED_BYTES:
                return os.pread(descriptor, end - start, start)
            skipped = start % mmap.ALLOCATIONGRANULARITY
            size, offset = end - start + skipped, start - skipped
            mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, offset=offset)
            return memoryview(mapped)[skipped:]
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        os.unlink(self.path)


class FileBlobs(Blobs):
    """Store with a file for each blob.

    `sweep` deletes files to which no record refers: leftovers of a killed server.

    Args:
        root: Directory for these files only; created if it is missing.
        fsync: Flush the bytes to the disk, so that they survive a loss of power, too.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self._root = root
        self._fsync = fsync
        root.mkdir(parents=True, exist_ok=True)

    def put(self, pieces: Iterable[Buffer]) -> FileBlob:
        """See base class; the file of a failed write (a full disk, for one) is deleted."""
        path, size = self._new_path(), 0
        try:
            with open(path, "xb") as file:
                for piece in pieces:
                    size += file.write(piece)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)
            raise
        return FileBlob(path, size)

    def share(self, leaf: Blob) -> FileBlob:
        """See base class: a second name of the same file."""
        assert isinstance(leaf, FileBlob)
        path = self._new_path()
        try:
            os.link(leaf.path, path)
        except OSError:  # a file system without hard links
            shutil.copyfile(leaf.path, path)
        return FileBlob(path, leaf.size)

    def open(self, names: Sequence[str]) -> Blob:
        """Return the blob whose leaves have these names, which `names_of` returned."""
        paths = [self._path(name) for name in names]
        leaves = [FileBlob(path, os.stat(path).st_size) for path in paths]
        return leaves[0] if len(leaves) == 1 else JoinedBlob(leaves)

    def sweep(self, names: set[str]) -> None:
        """Delete every file but those named."""
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name not in names:
                    os.unlink(entry.path)

    def _new_path(self) -> str:
        return self._path(uuid.uuid4().hex)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def names_of(blob: Blob) -> list[str]:
    """Return the names by which `FileBlobs.open` finds a blob."""
    return [leaf.path.rpartition("/")[2] for leaf in blob.leaves() if isinstance(leaf, FileBlob)]
