"""Saves of Python objects to the memory of the node daemon, and loads, in torch.save's format.

    object -> size when serialized -> segment of this size -> one copy, by several threads

The size is computed before the allocation, so that the segment is not larger than necessary.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from aioflux._files import PositionedFile
from aioflux._values.checksums import crc32c
from aioflux._values.meta import ObjectMeta
from aioflux.checkpoint._tag_checkpoints import Arena, pickle_state
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from aioflux.compat.nebula._daemon_client import DaemonClient


_PAGE_BYTES = 4096


class _DiskArena:
    """A mapped temporary file, for a part that does not fit in memory."""

    def __init__(self, number: int, size: int, directory: str) -> None:
        self.number, self.size = number, size
        with tempfile.TemporaryFile(dir=directory or None, prefix="aioflux-nebula-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # A full disk raises here, not in the copy.
            self.fd = os.dup(file.fileno())
        self._map = mmap.mmap(self.fd, size)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)


class SnapshotWriter:
    """Writer of snapshots to segments of the node daemon, which stay mapped for reuse."""

    def __init__(self, client: DaemonClient, disk: str) -> None:
        self._client = client
        self._disk = disk
        self._arenas: dict[int, Arena] = {}
        self._generation = 0

    def save(self, tag: str, name: str, value: Any, num_files: int) -> None:
        """Copy an object to memory, or to disk if memory is full, as a part of a tag."""
        started = time.perf_counter()
        pieces = pickle_state(value)
        size = -(-pieces.num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        kind, number, size, freed = self._client.call("allocate", size)
        self._unmap(freed)
        try:
            arena = self._arena(kind, number, size)
            pieces.copy_to(arena.view)
        except BaseException:
            with suppress(CheckpointError):
                self._client.call("cancel", number)
            raise
        seconds = time.perf_counter() - started
        fds = () if kind == "reuse" else (arena.fd,)
        part = (tag, name, pieces.num_bytes)
        try:
            self._client.call("add_part", number, part, num_files, seconds, fds=fds)
        finally:
            if isinstance(arena, Arena):
                arena.close_descriptor()  # The daemon has its own descriptor; the map remains.
            else:
                arena.close()

    def close(self) -> None:
        """Unmap all segments. The daemon keeps their contents."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _arena(self, kind: str, number: int, size: int) -> Arena | _DiskArena:
        if kind == "reuse":
            return self._arenas[number]
        if kind == "disk":
            try:
                return _DiskArena(number, size, self._disk)
            except OSError as exc:
                raise CheckpointError(
                    f"a part of {size:,} bytes fits neither in NEBULA_MEMORY_BUFFER_SIZE nor on "
                    f"disk ({exc}); increase NEBULA_MEMORY_BUFFER_SIZE"
                ) from exc
        arena = self._arenas[number] = Arena(number, size, is_shared=True)
        return arena

    def _unmap(self, freed: list[int]) -> None:
        if self._generation != self._client.generation:  # After a reconnect all numbers are new.
            self._generation = self._client.generation
            freed = list(self._arenas)
        for number in freed:
            if (arena := self._arenas.pop(number, None)) is not None:
                arena.close()


class _SegmentFile(PositionedFile):
    """Readable file over a part in the memory of the daemon."""

    def __init__(self, view: memoryview, name: str) -> None:
        super().__init__(ObjectMeta(key=name, uri=name, size=view.nbytes))
        self._view = view

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        data = self._view[self._position : self._position + target.nbytes]
        target[: data.nbytes] = data
        self._position += data.nbytes
        return data.nbytes


def load_segment(
    fd: int, size: int, checksum: int | None, name: str, *, map_location: Any, weights_only: bool
) -> Any:
    """Load a part of `size` bytes from the memory of the daemon; the bytes are copied once."""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        try:
            if checksum is not None and crc32c(view) != checksum:
                raise CheckpointCorruptError(f"{name} is damaged in memory")
            file: Any = _SegmentFile(view, name)
            return torch.load(file, map_location=map_location, weights_only=weights_only)
        finally:
            view.release()
