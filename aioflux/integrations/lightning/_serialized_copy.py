"""Copy of a checkpoint in host memory, serialized by torch.save, for an upload in the background.

The training thread waits only for this copy. The copy contains the whole checkpoint with all its
Python objects, and keeps the sharing of memory between tensors. Tensors of an accelerator are
copied one at a time, so that the accelerator never holds a second copy of the model. An object that
cannot be pickled raises an error in the training thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from aioflux._files import RawBinaryFile
from aioflux.checkpoint._tag_checkpoints import save_by_torch

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_SLAB_BYTES: Final = 32 * 1024 * 1024
"""Unit of allocation: small for a checkpoint, and large enough to make allocations rare."""


class MemoryPool:
    """Memory of earlier checkpoints, for reuse. A copy into new memory takes ten times as long."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def acquire(self) -> bytearray:
        """Return a free slab of the pool, or a new one if none is free."""
        try:
            return self._free.pop()
        except IndexError:  # A check before `pop` would race with the other thread.
            return bytearray(_SLAB_BYTES)

    def release(self, slabs: list[bytearray]) -> None:
        """Put slabs that are no longer in use back into the pool."""
        self._free += slabs

    def clear(self) -> None:
        """Free the memory that is not in use."""
        self._free.clear()


class SerializedCopy(RawBinaryFile):
    """A file that `torch.save` writes to; an upload then reads its bytes by `views`."""

    def __init__(self, memory: MemoryPool) -> None:
        self._memory = memory
        self._slabs: list[bytearray] = []
        self._free = memoryview(b"")
        """The part of the last slab that is not written yet."""
        self.num_bytes = 0

    @classmethod
    def of(cls, checkpoint: dict[str, Any], memory: MemoryPool) -> SerializedCopy:
        """Serialize a checkpoint into memory of the pool."""
        copy = cls(memory)
        try:
            save_by_torch(checkpoint, copy)
        except BaseException:
            copy.release()
            raise
        return copy

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Copy all of `data`, and return its size in bytes."""
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        while rest.nbytes:
            if not self._free.nbytes:
                self._slabs.append(self._memory.acquire())
                self._free = memoryview(self._slabs[-1])
            num = min(rest.nbytes, self._free.nbytes)
            self._free[:num] = rest[:num]
            self._free, rest = self._free[num:], rest[num:]
        self.num_bytes += size
        return size

    def views(self) -> Iterator[memoryview]:
        """Yield the written bytes in order."""
        rest = self.num_bytes
        for slab in self._slabs:
            yield memoryview(slab)[: min(rest, len(slab))]
            rest -= len(slab)

    def release(self) -> None:
        """Return the memory to the pool."""
        slabs, self._slabs, self._free, self.num_bytes = self._slabs, [], memoryview(b""), 0
        self._memory.release(slabs)
