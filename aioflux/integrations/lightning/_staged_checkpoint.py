"""Staged: a checkpoint as torch.save writes it, in host memory that is used again.

What the training thread waits for is one copy. All of the checkpoint is in it, whatever Python
objects it is made of, tensors that share memory share it still, and those of an accelerator come
over one at a time: there is no second copy of the model on the accelerator. What cannot be pickled
is an error where the checkpoint was made, not later.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

import torch

from aioflux._files import RawBinaryFile
from aioflux.checkpoint._save.save import leave_out_crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer


__all__ = ["Slabs", "Staged"]

_SLAB_BYTES: Final = 32 * 1024 * 1024
"""Small beside a checkpoint, large beside what it costs to take one."""


class Slabs:
    """Memory of earlier checkpoints: a copy into warm memory is ten times as fast as into fresh."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """Return a slab, a used one if there is one."""
        try:
            return self._free.pop()
        except IndexError:  # another thread may give one back meanwhile
            return bytearray(_SLAB_BYTES)

    def give_back(self, slabs: list[bytearray]) -> None:
        """Take slabs back that nobody looks at any more."""
        self._free += slabs

    def clear(self) -> None:
        """Let go of what is not in use."""
        self._free.clear()


class Staged(RawBinaryFile):
    """The bytes of one checkpoint: a file for `torch.save`, and views of them for an upload."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._taken: list[bytearray] = []
        self._room = memoryview(b"")
        self.num_bytes = 0
        """How many there are."""

    @classmethod
    def of(cls, checkpoint: dict[str, Any], slabs: Slabs) -> Staged:
        """Copy a checkpoint."""
        staged = cls(slabs)

        def run() -> None:
            leave_out_crc32()
            torch.save(checkpoint, staged)

        try:
            copy_context().run(run)  # of its own: nobody else sees what is set there
        except BaseException:
            staged.release()
            raise
        return staged

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Copy all of `data`."""
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        while rest.nbytes:
            if not self._room.nbytes:
                self._taken.append(self._slabs.take())
                self._room = memoryview(self._taken[-1])
            size_now = min(rest.nbytes, self._room.nbytes)
            self._room[:size_now] = rest[:size_now]
            self._room, rest = self._room[size_now:], rest[size_now:]
        self.num_bytes += size
        return size

    def views(self) -> Iterator[memoryview]:
        """Yield the bytes, in order."""
        rest = self.num_bytes
        for slab in self._taken:
            yield memoryview(slab)[: min(rest, len(slab))]
            rest -= len(slab)

    def release(self) -> None:
        """Give the memory back."""
        taken, self._taken, self._room, self.num_bytes = self._taken, [], memoryview(b""), 0
        self._slabs.give_back(taken)
