"""Blobs in files that never change.

A blob is one leaf, or the concatenation of several leaves (see `_blobs`). Each leaf is one file.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._blobs import Blob, Blobs, JoinedBlob

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing.gcs_server._messages import Buffer

_LEAF_NAME = re.compile(r"[0-9a-f]{32}")
"""Names of the files of a `FileBlobs`."""
_MAPPED_BYTES = 1024 * 1024
"""Smallest range that is memory-mapped. Copying a smaller range is cheaper."""


class FileBlob(Blob):
    """Leaf in a file."""

    __slots__ = ("path", "size")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    def view(self, start: int, end: int) -> Buffer:
        """See base class; a mapping stays valid after the file is deleted."""
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
    """Store of blobs in the files of a directory.

    Args:
        root: Directory of the files, created if it is missing. It must not have other files.
        fsync: Flush each file to disk, so that it survives a power loss.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self._root = root
        self._fsync = fsync
        root.mkdir(parents=True, exist_ok=True)

    def put(self, pieces: Iterable[Buffer]) -> FileBlob:
        """See base class; if writing fails, for example on a full disk, deletes the file."""
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
        """See base class; makes a hard link to the file."""
        assert isinstance(leaf, FileBlob)
        path = self._new_path()
        try:
            os.link(leaf.path, path)
        except OSError:  # the file system has no hard links
            shutil.copyfile(leaf.path, path)
        return FileBlob(path, leaf.size)

    def open(self, names: Sequence[str]) -> Blob:
        """Return the blob with these leaves, from the names that `leaf_names` returned."""
        paths = [self._path(name) for name in names]
        leaves = [FileBlob(path, os.stat(path).st_size) for path in paths]
        return leaves[0] if len(leaves) == 1 else JoinedBlob(leaves)

    def sweep(self, names: set[str]) -> None:
        """Delete every file whose name is not in `names`: a killed server leaves such files.

        Raises:
            ValueError: The directory has other entries than the files that `put` and `share`
                create. Nothing was deleted.
        """
        with os.scandir(self._root) as scan:
            entries = list(scan)
        for entry in entries:
            if not _LEAF_NAME.fullmatch(entry.name) or entry.is_dir():
                raise ValueError(
                    f"{entry.path} is not a file of this server: another program, or another "
                    "version of the server, wrote it; use an empty directory"
                )
        for entry in entries:
            if entry.name not in names:
                os.unlink(entry.path)

    def _new_path(self) -> str:
        return self._path(uuid.uuid4().hex)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def leaf_names(blob: Blob) -> list[str]:
    """Return the file names of the leaves of a blob, for `FileBlobs.open`."""
    return [leaf.path.rpartition("/")[2] for leaf in blob.leaves() if isinstance(leaf, FileBlob)]
