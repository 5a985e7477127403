"""StatePickle: the output of torch.save for an object, without a copy of its tensors.

    torch.save -> StatePickle: copies headers, keeps views of the tensors' memory -> total size
               -> one copy of all pieces into an arena; or an upload of the pieces

Tensors on devices other than the CPU are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux._files import RawBinaryFile
from aioflux._values.checksums import address_of
from aioflux.checkpoint._save.memory_copy import MemoryCopy, copy_all
from aioflux.checkpoint._save.tensor_memory import TensorMemory
from aioflux.checkpoint._save.torch_file import save_by_torch

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_MIN_VIEW_BYTES = 16 * 1024
"""Smaller pieces are copied: keeping a view costs as much as copying about 16 KiB."""


class StatePickle(RawBinaryFile):
    """A file for torch.save that keeps views of the tensors' memory, to copy or upload later."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self._pieces: list[memoryview] = []
        self._small = bytearray()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Keep a view of the data if it is memory of a tensor and not small; otherwise copy it."""
        view = memoryview(data).cast("B")
        tensor_view = self._memory.find(view) if view.nbytes >= _MIN_VIEW_BYTES else None
        if tensor_view is None:
            self._small += view
        else:
            self._flush_small()
            self._pieces.append(tensor_view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def copy_to(self, target: memoryview) -> None:
        """Copy all pieces to memory, which has at least `num_bytes` bytes."""
        self._flush_small()
        copies, offset = [], 0
        with address_of(target) as start:
            for piece in self._pieces:
                with address_of(piece) as source:
                    copies.append(MemoryCopy(start + offset, source, piece.nbytes))
                offset += piece.nbytes
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
    """Return the output of torch.save for a value.

    The tensors of the value must not change as long as the result is in use.
    """
    memory = TensorMemory()
    pickled = StatePickle(memory)
    save_by_torch(value, pickled, memory)
    return pickled
