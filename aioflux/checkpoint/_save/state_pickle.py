"""StatePickle: the bytes that torch.save writes of an object, without a copy of its tensors.

    torch.save -> StatePickle: headers are gathered, tensors noted where they are -> the size
               -> one copy, by a few threads; or an upload of the pieces

Besides the tensors in main memory it holds their headers, and copies of tensors of other devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux._files import RawBinaryFile
from aioflux._values.checksums import address_of
from aioflux.checkpoint._save.memory_copy import MemoryCopy, copy_all
from aioflux.checkpoint._save.save import save_by_torch
from aioflux.checkpoint._save.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


__all__ = ["StatePickle", "pickle_state"]

_LEAST_NOTED_BYTES = 16 * 1024
"""Less is copied at once: to note a piece costs as much as a copy of about 16 KiB."""


class StatePickle(RawBinaryFile):
    """The file that torch.save writes to: memory of tensors is noted, and copied later."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self._pieces: list[memoryview] = []
        self._small = bytearray()
        self.num_bytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Note all of `data`."""
        view = memoryview(data).cast("B")
        found = self._memory.find(view) if view.nbytes >= _LEAST_NOTED_BYTES else None
        if found is None:
            self._small += view
        else:
            self._flush_small()
            self._pieces.append(found)
        self.num_bytes += view.nbytes
        return view.nbytes

    def copy_to(self, target: memoryview) -> None:
        """Copy everything to memory of that size at least."""
        self._flush_small()
        copies, at = [], 0
        with address_of(target) as begin:
            for piece in self._pieces:
                with address_of(piece) as source:
                    copies.append(MemoryCopy(begin + at, source, piece.nbytes))
                at += piece.nbytes
            copy_all(copies)

    def views(self) -> list[memoryview]:
        """Return all pieces in order, without a copy."""
        self._flush_small()
        return self._pieces

    def _flush_small(self) -> None:
        if self._small:
            self._pieces.append(memoryview(bytes(self._small)))
            self._small.clear()


def pickle_state(value: Any) -> StatePickle:
    """Return what torch.save writes of a value, whose tensors must not change meanwhile."""
    memory = TensorMemory()
    pieces = StatePickle(memory)

    save_by_torch(value, pieces, memory)
    return pieces
