"""Targets of a load, and the ways of stored bytes into them.

    part of a tensor -> boxes -> `_DirectCopy`   contiguous in the target: read straight into it
                              -> `_StridedCopy`  rows with gaps, another dtype, another device
                              -> `FramesCopy`    compressed: decoded, then one of the two above
    any other item   -> `ItemCopy`               all bytes of the item, passed to a function, which
                                                 decodes them: `load_value` or `copy_item`

Bytes are passed as flat tensors, because torch releases the GIL while it copies tensors.

No item can run code, unless the caller passes `weights_only=False`. A transform is undone only by
an extension in the caller's registry.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

import torch

from aioflux.checkpoint._format.frames import plan_slices
from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES, find_tensor, is_dense, is_stored
from aioflux.checkpoint._load.plan import (
    MAX_GAP_BYTES,
    MAX_READ_BYTES,
    Box,
    cut_box,
    dense_strides,
    plan_boxes,
)
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint._format.frames import FrameSlice
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem, StoredShape

_MAX_STRIDED_BYTES: Final = MAX_READ_BYTES // 2
"""Largest `_StridedCopy` in bytes, including gaps."""

_TERMINAL_CODE: Final = re.compile(r"\x1b\[[0-9;]*m")
_TRUE: Final = {"1", "y", "yes", "true"}
"""Values of the environment variables of torch that turn a setting on."""
_MAX_RATIO: Final = 1024
_MIN_BOUND_BYTES: Final = 64 * 1024 * 1024
"""With its transforms undone, a value may have `_MAX_RATIO` times its stored bytes, or
`_MIN_BOUND_BYTES` if that is more. For a tensor, the bound is the size in the metadata."""

_ZIP_BYTES: Final = 64 * 1024
"""Upper bound for the bytes of a zip in addition to the tensor's memory."""


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
    """A copy of bytes `[start, end)` of an object to a target."""

    is_direct = False
    """The bytes are contiguous in the target's memory, and can be split."""
    index = 0
    """Index of the target."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def memory(self, start: int, end: int) -> memoryview | None:
        """Return the target's memory for bytes `[start, end)`; None if they need a buffer."""
        return None

    def finish(self, start: int, data: torch.Tensor) -> None:
        """Copy `data` to the target: the object's bytes from `start` on, decoded if compressed."""
        raise NotImplementedError


class _DirectCopy(RangeCopy):
    """Bytes that are contiguous in the target's memory and can be read straight into it."""

    is_direct = True

    def __init__(self, start: int, memory: torch.Tensor) -> None:
        super().__init__(start, start + memory.numel())
        self._memory = memory

    def memory(self, start: int, end: int) -> memoryview:
        return self._memory[start - self.start : end - self.start].numpy().data

    def finish(self, start: int, data: torch.Tensor) -> None:
        offset = start - self.start
        self._memory[offset : offset + data.numel()].copy_(data)


class _StridedCopy(RangeCopy):
    """Rows with gaps between them, or elements for another dtype or another device."""

    def __init__(self, target: TensorTarget, box: Box) -> None:
        super().__init__(box.start, box.end)
        self._target = target
        self._box = box

    def finish(self, start: int, data: torch.Tensor) -> None:
        dtype, sizes = self._target.shape.dtype, self._target.shape.sizes
        elements = as_elements(data, dtype).as_strided(self._box.lengths, dense_strides(sizes))
        narrow(self._target.tensor, self._box.offsets, self._box.lengths).copy_(elements)


class ItemCopy(RangeCopy):
    """All bytes of an item, passed to a function as a flat tensor."""

    def __init__(self, stored: LocatedItem, load: Callable[[torch.Tensor], None]) -> None:
        super().__init__(stored.offset, stored.offset + stored.length)
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
        super().__init__(begin + first.stored_start, begin + last.stored_end)
        self.slices = slices
        self._decoded = decoded

    @property
    def num_bytes(self) -> int:
        return self._decoded.end - self._decoded.start

    def decoded_memory(self) -> memoryview | None:
        """Return the target's memory to decode into; None if the decoded bytes need a buffer."""
        return self._decoded.memory(self._decoded.start, self._decoded.end)

    def finish(self, start: int, data: torch.Tensor) -> None:
        self._decoded.finish(self._decoded.start, data)


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
            copy.start,
            copy.end,
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


def default_registry() -> ExtensionRegistry:
    """Return a registry with torch's own transforms and `ZStandard`."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint.compression import ZStandard

    registry = ExtensionRegistry()
    registry.register(ZStandard)
    return registry


def as_bytes(data: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor of bytes."""
    return data.numpy().data


def find_memory(head: torch.Tensor, target: TensorTarget, uri: str) -> int | None:
    """Return the offset of a tensor's memory in its item; None if the item must be read whole.

    Raises:
        CheckpointCorruptError: Shape or dtype of the tensor differ from the metadata, or the tensor
            is longer than its item.
    """
    zipped = find_tensor(bytes(as_bytes(head[:HEAD_SIZE_BYTES])))
    if zipped is None:
        return None
    sizes, dtype = target.shape
    if zipped.shape != sizes or f"torch.{zipped.dtype}" != str(dtype):
        reason = f"it is {zipped.dtype} of {zipped.shape}, not {dtype} of {sizes}"
        raise _corrupt(uri, target, reason)
    end = zipped.start + target.shape.num_bytes
    if end > target.stored.length and not target.stored.descriptors:
        raise _corrupt(uri, target, "it is longer than its item")
    return zipped.start


def copy_item(
    data: torch.Tensor, target: TensorTarget, uri: str, registry: ExtensionRegistry
) -> None:
    """Copy a part of a tensor to its target; `data` is the whole item.

    Raises:
        CheckpointError: The registry lacks a transform.
        CheckpointCorruptError: The item is damaged, or its tensor differs from the metadata.
    """
    if target.stored.descriptors:
        bound = target.shape.num_bytes + _ZIP_BYTES
        data = untransform(data, target.name, target.stored, uri, registry, bound=bound)
    start = find_memory(data, target, uri)
    sizes, dtype = target.shape
    if start is None:
        tensor = _load_tensor(data, target, uri)
    else:
        memory = data[start : start + target.shape.num_bytes]
        if memory.numel() != target.shape.num_bytes:
            raise _corrupt(uri, target, "it is truncated")
        tensor = as_elements(memory, dtype).view(sizes)
    target.tensor.copy_(narrow(tensor, target.offsets, target.lengths))


def _load_tensor(data: torch.Tensor, target: TensorTarget, uri: str) -> torch.Tensor:
    try:
        _require_plain_zip(as_bytes(data))
        tensor = torch.load(io.BytesIO(as_bytes(data)), map_location="cpu", weights_only=True)
    except Exception as exc:  # torch.load raises any class, depending on the damage
        raise _corrupt(uri, target, f"torch.load raised {_first_line(exc)}") from exc
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != target.shape.sizes:
        raise _corrupt(uri, target, f"it is not a tensor of {target.shape.sizes}")
    return tensor


def untransform(
    data: torch.Tensor,
    name: str,
    stored: LocatedItem,
    uri: str,
    registry: ExtensionRegistry,
    *,
    bound: int | None = None,
) -> torch.Tensor:
    """Undo the transforms of an item, such as its compression, and return the bytes.

    The result may have at most `bound` bytes; the default is a multiple of the stored bytes.

    Raises:
        CheckpointError: The registry lacks a transform.
        CheckpointCorruptError: A transform cannot be undone, or its result is too large.
    """
    if bound is None:
        bound = max(_MIN_BOUND_BYTES, _MAX_RATIO * stored.length)
    try:
        extensions: Sequence[Any] = registry.from_descriptor_list(stored.descriptors)
    except ValueError as exc:
        raise CheckpointError(
            f"{name!r} in {uri} is transformed by {', '.join(stored.descriptors)}, which is not "
            f"registered: {exc}; pass a registry with this extension as extension_registry="
        ) from exc
    stream: IO[bytes] = io.BytesIO(as_bytes(data))
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        whole = _read_bounded(stream, bound)
    except Exception as exc:  # each extension raises its own classes
        raise CheckpointCorruptError(
            f"{uri} is damaged: {name!r} cannot be transformed back: {_first_line(exc)}; load an "
            "earlier checkpoint"
        ) from exc
    return (
        torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)
    )


def _read_bounded(stream: IO[bytes], bound: int) -> bytearray:
    whole = bytearray()
    while piece := stream.read(min(1 << 20, bound + 1 - len(whole))):
        whole += piece
        if len(whole) > bound:
            raise ValueError(f"the result is longer than {bound} bytes")
    return whole


def load_value(
    data: memoryview,
    name: str,
    uri: str,
    *,
    map_location: str | torch.device = "cpu",
    weights_only: bool = True,
) -> Any:
    """Return the value of an item that is not a tensor.

    Raises:
        CheckpointError: `weights_only` is True, and the pickle contains objects of classes that are
            not allowed.
        CheckpointCorruptError: The item cannot be read.
    """
    try:
        _require_plain_zip(data)
        file = io.BytesIO(data)
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except Exception as exc:  # torch.load raises any class, depending on the damage
        is_forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
        if isinstance(exc, pickle.UnpicklingError) and (weights_only or is_forced):
            raise CheckpointError(
                f"{name!r} in {uri} is not loaded: weights_only=True rejects its pickle "
                f"({_first_line(exc)}); no code in it was run. Pass its classes to "
                "torch.serialization.add_safe_globals, or, for checkpoints that you trust as you "
                "trust code, "
                + (
                    "unset TORCH_FORCE_WEIGHTS_ONLY_LOAD"
                    if is_forced
                    else "pass weights_only=False"
                )
            ) from exc
        raise CheckpointCorruptError(
            f"{uri} is damaged: {name!r} cannot be read: {_first_line(exc)}; load an earlier "
            "checkpoint"
        ) from exc


def _require_plain_zip(data: memoryview) -> None:
    """Raise ValueError if entries of a zip are compressed, or state more bytes than the zip has."""
    if bytes(data[:2]) == b"PK" and not is_stored(io.BytesIO(data), data.nbytes):
        raise ValueError("its zip has entries that are compressed or larger than the zip")


def _first_line(error: BaseException) -> str:
    lines = _TERMINAL_CODE.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _corrupt(uri: str, target: TensorTarget, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{uri} is damaged: the stored {target.name!r} differs from the metadata: {reason}; load "
        "an earlier checkpoint"
    )
