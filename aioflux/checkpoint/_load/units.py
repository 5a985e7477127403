"""Units of a load: a run of stored bytes each, and what becomes of it.

    wanted tensor -> boxes -> `_Run`     its bytes are those of the target's memory
                           -> `_Slab`    rows with gaps, another dtype, another device: copied
                           -> `_Frames`  compressed: decoded, then as one of the others
    anything else -> `_Item` all bytes of the item, to whoever understands them

Memory is handed around as flat tensors of bytes: copying these releases the GIL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from aioflux.checkpoint._format.frames import plan_slices
from aioflux.checkpoint._load.plan import (
    MAX_GAP_BYTES,
    MAX_READ_BYTES,
    Box,
    Piece,
    cut_box,
    dense_strides,
    is_dense,
    plan_boxes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from aioflux.checkpoint._format.frames import FrameSlice
    from aioflux.checkpoint._load.source import Shape, Stored

__all__ = ["Frames", "Unit", "Wanted", "as_elements", "item_unit", "narrow", "tensor_units"]

_MAX_SLAB_BYTES: Final = MAX_READ_BYTES // 2
"""Bytes that are copied at once, out of a buffer of so many."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a stored tensor, and where it goes."""

    name: str
    stored: Stored
    shape: Shape
    """Of the stored tensor."""
    offsets: tuple[int, ...]
    """First element wanted of it."""
    target: torch.Tensor
    """Takes the elements; of any dtype, device and strides."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements wanted in each dimension."""
        return tuple(self.target.shape)


class Unit:
    """A run of stored bytes, and what becomes of it."""

    piece: Piece

    def memory(self, start: int, end: int) -> memoryview | None:
        """Return where bytes `[start, end)` of the object go as they are; None: to `finish`."""
        return None

    def finish(self, start: int, data: torch.Tensor) -> None:
        """Take bytes of the object from `start` on; called in the thread that loads."""
        raise NotImplementedError


class _Run(Unit):
    """Bytes that are those of the target's memory."""

    def __init__(self, start: int, memory: torch.Tensor) -> None:
        self.piece = Piece(start, start + memory.numel(), True)
        self._memory = memory

    def memory(self, start: int, end: int) -> memoryview:
        """See base class."""
        at = self.piece.start
        return self._memory[start - at : end - at].numpy().data

    def finish(self, start: int, data: torch.Tensor) -> None:
        """See base class."""
        at = start - self.piece.start
        self._memory[at : at + data.numel()].copy_(data)


class _Slab(Unit):
    """Rows with gaps between them, or elements of another dtype or for another device."""

    def __init__(self, wanted: Wanted, box: Box) -> None:
        self.piece = Piece(box.start, box.end, False)
        self._wanted = wanted
        self._box = box

    def finish(self, start: int, data: torch.Tensor) -> None:
        """See base class."""
        dtype, sizes = self._wanted.shape.dtype, self._wanted.shape.sizes
        elements = as_elements(data, dtype).as_strided(self._box.lengths, dense_strides(sizes))
        narrow(self._wanted.target, self._box.offsets, self._box.lengths).copy_(elements)


class _Item(Unit):
    """All bytes of an item, for whoever understands them."""

    def __init__(self, stored: Stored, take: Callable[[torch.Tensor], None]) -> None:
        self.piece = Piece(stored.offset, stored.offset + stored.length, False)
        self._take = take

    def finish(self, start: int, data: torch.Tensor) -> None:
        """See base class."""
        self._take(data)


class Frames(Unit):
    """Compressed frames: whoever reads them decodes them into `raw`, and `finish` follows."""

    def __init__(self, stored: Stored, slices: Sequence[FrameSlice], then: Unit) -> None:
        assert stored.item is not None
        self.plane_size = stored.item.plane_size
        at = stored.item.data_start
        self.piece = Piece(at + slices[0].stored_start, at + slices[-1].stored_end, False)
        self.slices = slices
        self._then = then

    @property
    def num_bytes(self) -> int:
        """Bytes that are decoded."""
        return self._then.piece.end - self._then.piece.start

    def raw_memory(self) -> memoryview | None:
        """Return where they go as they are, if they do."""
        piece = self._then.piece
        return self._then.memory(piece.start, piece.end)

    def finish(self, start: int, data: torch.Tensor) -> None:
        """Take the decoded bytes."""
        self._then.finish(self._then.piece.start, data)


def item_unit(stored: Stored, take: Callable[[torch.Tensor], None]) -> Unit:
    """Return the unit that brings all bytes of an item, as a flat tensor of bytes."""
    return _Item(stored, take)


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all bytes of the storage of a tensor as a tensor, where they can be written so."""
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
    """Return bytes as elements of a dtype, copied where these must begin elsewhere in memory."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a view of a box of a tensor."""
    for axis, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, at, length)
    return tensor


def tensor_units(wanted: Wanted, data_start: int) -> Iterator[Unit]:
    """Yield the units of a part of a tensor whose memory begins at `data_start` in its object.

    Raises:
        CheckpointCorruptError: It is compressed, and its table of frames cannot be one.
    """
    item = wanted.stored.item
    if item is None or not item.frame_size:
        yield from _plain_units(wanted, data_start)
        return
    # Positions are those in the tensor's memory here, however much of it the frames take.
    for unit in _plain_units(wanted, 0, max_gap_bytes=item.frame_size, is_cut=True):
        slices = plan_slices(
            unit.piece.start,
            unit.piece.end,
            size=item.data_size,
            frame_size=item.frame_size,
            frame_ends=item.frame_ends,
        )
        yield Frames(wanted.stored, slices, unit)


def _plain_units(
    wanted: Wanted, data_start: int, *, max_gap_bytes: int = MAX_GAP_BYTES, is_cut: bool = False
) -> Iterator[Unit]:
    sizes, dtype = wanted.shape
    item_size, target = dtype.itemsize, wanted.target
    memory = _flat_memory(target) if target.dtype == dtype else None
    boxes = plan_boxes(
        sizes,
        wanted.offsets,
        wanted.lengths,
        item_size=item_size,
        data_start=data_start,
        max_gap_bytes=max_gap_bytes,
    )
    for whole in boxes:
        is_run = memory is not None and _is_run(whole, target.stride(), item_size)
        cuts: Iterable[Box] = (whole,)
        if is_cut or not is_run:
            cuts = cut_box(whole, sizes, item_size=item_size, max_span_bytes=_MAX_SLAB_BYTES)
        for box in cuts:
            if memory is None or not _is_run(box, target.stride(), item_size):
                yield _Slab(wanted, box)
                continue
            first = sum(at * step for at, step in zip(box.offsets, target.stride(), strict=True))
            at = (target.storage_offset() + first) * item_size
            yield _Run(box.start, memory[at : at + box.end - box.start])


def _is_run(box: Box, strides: Sequence[int], item_size: int) -> bool:
    """Tell whether the elements of a box lie one behind the other, stored and in the target."""
    size = item_size * math.prod(box.lengths)
    return size == box.end - box.start and is_dense(box.lengths, strides)
