"""Copies of a load: each copies one range of stored bytes into a target.

    part of a tensor -> boxes -> `_DirectCopy`   contiguous in the target: read straight into it
                              -> `_StridedCopy`  rows with gaps, another dtype, another device
                              -> `FramesCopy`    compressed: decoded, then one of the two above
    any other item   -> `ItemCopy`               all bytes of the item, passed to a function

Bytes are passed as flat tensors, because torch releases the GIL while it copies tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    from aioflux.checkpoint._format.frames import FrameSlice
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem, StoredShape

_MAX_STRIDED_BYTES: Final = MAX_READ_BYTES // 2
"""Largest `_StridedCopy` in bytes, including gaps."""


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """A part of a stored tensor, and the tensor that it is loaded into."""

    name: str
    stored: LocatedItem
    shape: StoredShape
    """Sizes and dtype of the stored tensor."""
    offsets: tuple[int, ...]
    """Position of the part's first element in the stored tensor."""
    tensor: torch.Tensor
    """Has the sizes of the part, and any dtype, device and strides."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class ValueTarget:
    """A value that is not a tensor. The load calls `load` with the bytes of its item."""

    name: str
    stored: LocatedItem
    load: Callable[[torch.Tensor], None]


class RangeCopy:
    """One range of stored bytes that a target needs."""

    needed: NeededRange

    def memory(self, start: int, end: int) -> memoryview | None:
        """Return the target's memory for bytes `[start, end)`; None if they need a buffer."""
        return None

    def finish(self, start: int, data: torch.Tensor) -> None:
        """Copy `data` to the target: the object's bytes from `start` on, decoded if compressed."""
        raise NotImplementedError


class _DirectCopy(RangeCopy):
    """Bytes that are contiguous in the target's memory and can be read straight into it."""

    def __init__(self, start: int, memory: torch.Tensor) -> None:
        self.needed = NeededRange(start, start + memory.numel(), True)
        self._memory = memory

    def memory(self, start: int, end: int) -> memoryview:
        offset = self.needed.start
        return self._memory[start - offset : end - offset].numpy().data

    def finish(self, start: int, data: torch.Tensor) -> None:
        offset = start - self.needed.start
        self._memory[offset : offset + data.numel()].copy_(data)


class _StridedCopy(RangeCopy):
    """Rows with gaps between them, or elements for another dtype or another device."""

    def __init__(self, target: TensorTarget, box: Box) -> None:
        self.needed = NeededRange(box.start, box.end, False)
        self._target = target
        self._box = box

    def finish(self, start: int, data: torch.Tensor) -> None:
        dtype, sizes = self._target.shape.dtype, self._target.shape.sizes
        elements = as_elements(data, dtype).as_strided(self._box.lengths, dense_strides(sizes))
        narrow(self._target.tensor, self._box.offsets, self._box.lengths).copy_(elements)


class ItemCopy(RangeCopy):
    """All bytes of an item, passed to a function as a flat tensor."""

    def __init__(self, stored: LocatedItem, load: Callable[[torch.Tensor], None]) -> None:
        self.needed = NeededRange(stored.offset, stored.offset + stored.length, False)
        self._load = load

    def finish(self, start: int, data: torch.Tensor) -> None:
        self._load(data)


class FramesCopy(RangeCopy):
    """Compressed frames. They are decoded first, and another copy uses the decoded bytes."""

    def __init__(
        self, stored: LocatedItem, slices: Sequence[FrameSlice], decoded: RangeCopy
    ) -> None:
        assert stored.item is not None
        self.plane_size = stored.item.plane_size
        begin = stored.item.data_start
        first, last = slices[0], slices[-1]
        self.needed = NeededRange(begin + first.stored_start, begin + last.stored_end, False)
        self.slices = slices
        self._decoded = decoded

    @property
    def num_bytes(self) -> int:
        return self._decoded.needed.end - self._decoded.needed.start

    def decoded_memory(self) -> memoryview | None:
        """Return the target's memory to decode into; None if the decoded bytes need a buffer."""
        needed = self._decoded.needed
        return self._decoded.memory(needed.start, needed.end)

    def finish(self, start: int, data: torch.Tensor) -> None:
        self._decoded.finish(self._decoded.needed.start, data)


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the storage of a tensor as bytes; None if bytes cannot be read straight into it."""
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
    """Return bytes as elements of a dtype. Bytes that are not aligned for the dtype are copied."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a view of the part of a tensor at `offsets` with the sizes `lengths`."""
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, offset, length)
    return tensor


def plan_tensor_copies(target: TensorTarget, data_start: int) -> Iterator[RangeCopy]:
    """Yield the copies of a part of a tensor whose bytes begin at `data_start` in its object.

    Raises:
        CheckpointCorruptError: The frames of the compressed tensor do not fit its size.
    """
    item = target.stored.item
    if item is None or not item.frame_size:
        yield from _plan_copies(target, data_start)
        return
    # The offsets of these copies are offsets in the decoded memory of the tensor.
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
            first = sum(i * step for i, step in zip(box.offsets, tensor.stride(), strict=True))
            begin = (tensor.storage_offset() + first) * item_size
            yield _DirectCopy(box.start, memory[begin : begin + box.end - box.start])


def _is_contiguous(box: Box, strides: Sequence[int], item_size: int) -> bool:
    """Return whether the elements of a box are contiguous in the object and in the target."""
    size = item_size * math.prod(box.lengths)
    return size == box.end - box.start and is_dense(box.lengths, strides)
