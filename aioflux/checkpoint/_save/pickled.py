"""What torch.save writes of an object, without a copy of its tensors: where the bytes are.

    torch.save -> Pickled: headers are gathered, tensors noted where they are -> how much it is
               -> one copy, by a few threads; or an upload of the pieces

Beside the tensors in main memory it takes their headers, and what is copied from elsewhere.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch

from aioflux._files import RawBinaryFile
from aioflux._values.checksums import address_of
from aioflux.checkpoint._save.save import leave_out_crc32
from aioflux.checkpoint._save.staging_copy import Copy, copy_all
from aioflux.checkpoint._save.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


__all__ = ["Pickled", "pickled"]

_LEAST_NOTED_BYTES = 16 * 1024
"""Less is copied at once: to note a piece costs as much as a copy of some 16 KiB."""


class Pickled(RawBinaryFile):
    """The file that torch.save writes to: what lies in tensors is noted and copied later."""

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
                    copies.append(Copy(begin + at, source, piece.nbytes))
                at += piece.nbytes
            copy_all(copies)

    def views(self) -> list[memoryview]:
        """Return everything where it is, in order."""
        self._flush_small()
        return self._pieces

    def _flush_small(self) -> None:
        if self._small:
            self._pieces.append(memoryview(bytes(self._small)))
            self._small.clear()


def pickled(value: Any) -> Pickled:
    """Return what torch.save writes of a value, whose tensors stay as they are meanwhile."""
    memory = TensorMemory()
    pieces = Pickled(memory)

    def run() -> None:
        leave_out_crc32()
        torch.save(value, pieces, pickle_module=memory.pickle_module())

    copy_context().run(run)  # of its own: nobody else sees what is set there
    return pieces
