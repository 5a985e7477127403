"""Copies of a load: a range of stored bytes each, and the memory or the value it becomes.

    part of a tensor -> boxes -> `_DirectCopy`   contiguous in the target: read straight into it
                              -> `_StridedCopy`  rows with gaps, another dtype, another device
                              -> `FramesCopy`    compressed: decoded, then as one of the others
    anything else    -> `ItemCopy`               all bytes of the item, passed to a function

Memory is passed as flat tensors of bytes: torch releases the GIL while it copies these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from aioflux.checkpoint._format.frames import plan_slices
from aioflux.checkpoint._format.tensor_zip import is_dense
from aioflux.checkpoint._load.plan import (
    MAX_GAP_BYTES,
    MAX_READ_BYTES,
    Box,
    NeededRange,
    cut_box,
    dense_strides,
    plan_boxes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from aioflux.checkpoint._format.frames import FrameSlice
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem, StoredShape

__all__ = [
    "FramesCopy",
    "ItemCopy",
    "RangeCopy",
    "TensorTarget",
    "ValueTarget",
    "as_elements",
    "narrow",
    "plan_tensor_copies",
]

_MAX_STRIDED_BYTES: Final = MAX_READ_BYTES // 2
"""Most bytes that one `_StridedCopy` copies."""


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """A part of a stored tensor, and the tensor that it is loaded into."""

    name: str
    stored: LocatedItem
    shape: StoredShape
    """Of the stored tensor."""
    offsets: tuple[int, ...]
    """First element of the part."""
    tensor: torch.Tensor
    """Of the sizes of the part; of any dtype, device and strides."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of the part in each dimension."""
        return tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class ValueTarget:
    """A value that is no tensor, and the function that is passed the bytes of its item."""

    name: str
    stored: LocatedItem
    load: Callable[[torch.Tensor], None]


class RangeCopy:
    """A range of stored bytes, and its copy into a target."""

    needed: NeededRange

    def memory(self, start: int, end: int) -> memoryview | None:
        """Return the memory to read bytes `[start, end)` of the object into, if there is any."""
        return None

    def finish(self, start: int, data: torch.Tensor) -> None:
        """Copy bytes of the object from `start` on; called in the thread that loads."""
        raise NotImplementedError


class _DirectCopy(RangeCopy):
    """Bytes that are contiguous in the target's memory."""

    def __init__(self, start: int, memory: torch.Tensor) -> None:
        self.needed = NeededRange(start, start + memory.numel(), True)
        self._memory = memory

    def memory(self, start: int, end: int) -> memoryview:
        """See base class."""
        at = self.needed.start
        return self._memory[start - at : end - at].numpy().data

    def finish(self, start: int, data: torch.Tensor) -> None:
        """See base class."""
        at = start - self.needed.start
        self._memory[at : at + data.numel()].copy_(data)


class _StridedCopy(RangeCopy):
    """Rows with gaps between them, or elements of another dtype or for another device."""

    def __init__(self, target: TensorTarget, box: Box) -> None:
        self.needed = NeededRange(box.start, box.end, False)
        self._target = target
        self._box = box

    def finish(self, start: int, data: torch.Tensor) -> None:
        """See base class."""
        dtype, sizes = self._target.shape.dtype, self._target.shape.sizes
        elements = as_elements(data, dtype).as_strided(self._box.lengths, dense_strides(sizes))
        narrow(self._target.tensor, self._box.offsets, self._box.lengths).copy_(elements)


class ItemCopy(RangeCopy):
    """All bytes of an item, passed to a function as a flat tensor."""

    def __init__(self, stored: LocatedItem, load: Callable[[torch.Tensor], None]) -> None:
        self.needed = NeededRange(stored.offset, stored.offset + stored.length, False)
        self._load = load

    def finish(self, start: int, data: torch.Tensor) -> None:
        """See base class."""
        self._load(data)


class FramesCopy(RangeCopy):
    """Compressed frames, which are decoded before another copy gets their bytes."""

    def __init__(
        self, stored: LocatedItem, slices: Sequence[FrameSlice], decoded: RangeCopy
    ) -> None:
        assert stored.item is not None
        self.plane_size = stored.item.plane_size
        at = stored.item.data_start
        self.needed = NeededRange(at + slices[0].stored_start, at + slices[-1].stored_end, False)
        self.slices = slices
        self._decoded = decoded

    @property
    def num_bytes(self) -> int:
        """Bytes after decoding."""
        return self._decoded.needed.end - self._decoded.needed.start

    def decoded_memory(self) -> memoryview | None:
        """Return the memory to decode into, if there is any."""
        needed = self._decoded.needed
        return self._decoded.memory(needed.start, needed.end)

    def finish(self, start: int, data: torch.Tensor) -> None:
        """Copy the decoded bytes."""
        self._decoded.finish(self._decoded.needed.start, data)


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all bytes of the storage of a tensor, or None if they cannot be written directly."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def as_elements(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as elements of a dtype, copied if they are not aligned for it."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a view of a box of a tensor."""
    for axis, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, at, length)
    return tensor


def plan_tensor_copies(target: TensorTarget, data_start: int) -> Iterator[RangeCopy]:
    """Yield the copies of a part of a tensor whose memory begins at `data_start` in its object.

    Raises:
        CheckpointCorruptError: It is compressed, and its table of frames contradicts its size.
    """
    item = target.stored.item
    if item is None or not item.frame_size:
        yield from _plan_copies(target, data_start)
        return
    # Offsets count the tensor's decoded memory here.
    for copy in _plan_copies(target, 0, max_gap_bytes=item.frame_size, is_cut=True):
        slices = plan_slices(
            copy.needed.start,
            copy.needed.end,
            size=item.data_size,
            frame_size=item.frame_size,
            frame_ends=item.frame_ends,
        )
        yield FramesCopy(target.stored, slices, copy)


def _plan_copies(
    target: TensorTarget,
    data_start: int,
    *,
    max_gap_bytes: int = MAX_GAP_BYTES,
    is_cut: bool = False,
) -> Iterator[RangeCopy]:
    sizes, dtype = target.shape
    item_size, tensor = dtype.itemsize, target.tensor
    memory = _flat_memory(tensor) if tensor.dtype == dtype else None
    boxes = plan_boxes(
        sizes,
        target.offsets,
        target.lengths,
        item_size=item_size,
        data_start=data_start,
        max_gap_bytes=max_gap_bytes,
    )
    for whole in boxes:
        is_direct = memory is not None and _is_contiguous(whole, tensor.stride(), item_size)
        cuts: Iterable[Box] = (whole,)
        if is_cut or not is_direct:
            cuts = cut_box(whole, sizes, item_size=item_size, max_span_bytes=_MAX_STRIDED_BYTES)
        for box in cuts:
            if memory is None or not _is_contiguous(box, tensor.stride(), item_size):
                yield _StridedCopy(target, box)
                continue
            first = sum(at * step for at, step in zip(box.offsets, tensor.stride(), strict=True))
            at = (tensor.storage_offset() + first) * item_size
            yield _DirectCopy(box.start, memory[at : at + box.end - box.start])


def _is_contiguous(box: Box, strides: Sequence[int], item_size: int) -> bool:
    """Return whether the elements of a box are contiguous, both stored and in the target."""
    size = item_size * math.prod(box.lengths)
    return size == box.end - box.start and is_dense(box.lengths, strides)
