"""A checkpoint as torch.save writes it, in host memory that is reused.

The training thread waits for one copy. It holds the whole checkpoint, whatever Python objects are
in it. Tensors that share memory still share it, and those of an accelerator are copied one at a
time: there is no second copy of the model on the accelerator. An object that cannot be pickled is
an error when the checkpoint is saved, not later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aioflux._files import RawBinaryFile
from aioflux.checkpoint._tag_checkpoints import save_by_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer


__all__ = ["MemoryPool", "SerializedCopy"]

_SLAB_BYTES: Final = 32 * 1024 * 1024
"""Small compared with a checkpoint, large compared with the cost of an allocation."""


class MemoryPool:
    """Memory of earlier checkpoints: a copy into warm memory is ten times as fast as into fresh."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def acquire(self) -> bytearray:
        """Return a slab, a used one if there is one."""
        try:
            return self._free.pop()
        except IndexError:  # another thread may release one meanwhile
            return bytearray(_SLAB_BYTES)

    def release(self, slabs: list[bytearray]) -> None:
        """Return slabs that are no longer read."""
        self._free += slabs

    def clear(self) -> None:
        """Free the memory that is not in use."""
        self._free.clear()


class SerializedCopy(RawBinaryFile):
    """The bytes of one checkpoint: a file for `torch.save`, and views of them for an upload."""

    def __init__(self, memory: MemoryPool) -> None:
        self._memory = memory
        self._slabs: list[bytearray] = []
        self._free = memoryview(b"")
        """The rest of the last slab."""
        self.num_bytes = 0

    @classmethod
    def of(cls, checkpoint: dict[str, Any], memory: MemoryPool) -> SerializedCopy:
        """Serialize a checkpoint."""
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
        """Copy all of `data`."""
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
        """Yield the bytes, in order."""
        rest = self.num_bytes
        for slab in self._slabs:
            yield memoryview(slab)[: min(rest, len(slab))]
            rest -= len(slab)

    def release(self) -> None:
        """Return the memory to the pool."""
        slabs, self._slabs, self._free, self.num_bytes = self._slabs, [], memoryview(b""), 0
        self._memory.release(slabs)
