"""What torch.save writes of an object, copied once, into memory that the keeper holds, too.

    object -> how many bytes it is -> room of that size -> one copy, by a few threads

Room is asked for when the size is known, so that none of the budget is held for nothing.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from aioflux._files import RawBinaryFile
from aioflux._values.checksums import crc32c
from aioflux.checkpoint._save.staging import Arena
from aioflux.checkpoint._save.state_pickle import pickle_state
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from aioflux.compat.nebula._client import Client


__all__ = ["Snapshots", "load_piece"]

_PAGE_BYTES = 4096


class _DiskArena:
    """A piece of the disk in the place of memory, for what memory has no room for."""

    def __init__(self, number: int, size: int, directory: str) -> None:
        self.number, self.size = number, size
        with tempfile.TemporaryFile(dir=directory or None, prefix="aioflux-nebula-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # no room is an error here, not a signal
            self.fd = os.dup(file.fileno())
        self._map = mmap.mmap(self.fd, size)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give it back."""
        self.view.release()
        self._map.close()
        os.close(self.fd)


class Snapshots:
    """Copies objects to the keeper; memory that was mapped once is used again."""

    def __init__(self, client: Client, disk: str = "") -> None:
        self._client = client
        self._disk = disk
        self._arenas: dict[int, Arena] = {}
        self._generation = 0

    def save(self, tag: str, name: str, value: Any, num_files: int) -> bool:
        """Copy an object to memory, as a part of a tag.

        Returns:
            Whether the tag is complete with it.

        Raises:
            CheckpointError: It could not be handed over.
        """
        begun = time.perf_counter()
        pieces = pickle_state(value)
        size = -(-pieces.num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        kind, number, its_size, gone = self._client.call("room", size)
        self._forget(gone)
        try:
            arena = self._arena(kind, number, its_size)
            pieces.copy_to(arena.view)
        except BaseException:
            with suppress(CheckpointError):
                self._client.call("abandon", number)
            raise
        seconds = time.perf_counter() - begun
        fds = () if kind == "reuse" else (arena.fd,)
        part = (tag, name, pieces.num_bytes)
        try:
            return bool(self._client.call("saved", number, part, num_files, seconds, fds=fds))
        finally:
            if isinstance(arena, Arena):
                arena.close_descriptor()  # the keeper has it, and the map is enough here
            else:
                arena.close()

    def close(self) -> None:
        """Give up what is mapped here; the keeper has it still."""
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
                    f"a part of {size:,} bytes has no room: neither in NEBULA_MEMORY_BUFFER_SIZE "
                    f"nor on the disk ({exc}); allow for more memory"
                ) from exc
        arena = self._arenas[number] = Arena(number, size, is_shared=True)
        return arena

    def _forget(self, gone: list[int]) -> None:
        if self._generation != self._client.generation:
            self._generation = self._client.generation
            kept = [each for each in self._arenas if each not in gone]
            gone = [*gone, *kept]
        for number in gone:
            if (arena := self._arenas.pop(number, None)) is not None:
                arena.close()


class _Lent(RawBinaryFile):
    """The bytes of a part, read where the keeper has them."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to another byte."""
        base = (0, self._at, self._view.nbytes)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Copy to `buffer`."""
        into = memoryview(buffer).cast("B")
        piece = self._view[self._at : self._at + into.nbytes]
        into[: piece.nbytes] = piece
        self._at += piece.nbytes
        return piece.nbytes


def load_piece(
    fd: int, size: int, checksum: int | None, what: str, *, map_location: Any, weights_only: bool
) -> Any:
    """Load a part from memory of the keeper, which is copied once.

    Args:
        fd: The memory.
        size: Bytes of the part.
        checksum: Their crc32c where it is known.
        what: How an error calls it.
        map_location: As `torch.load`.
        weights_only: As `torch.load`.

    Raises:
        CheckpointCorruptError: The bytes are not those that were saved.
    """
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        try:
            if checksum is not None and crc32c(view) != checksum:
                raise CheckpointCorruptError(f"{what} is damaged in memory")
            with _Lent(view) as file:
                return torch.load(file, map_location=map_location, weights_only=weights_only)
        finally:
            view.release()
