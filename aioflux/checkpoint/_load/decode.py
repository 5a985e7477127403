"""Decoding of whole items: values, and tensors that cannot be read by ranges.

No item can run code, unless the caller passes `weights_only=False`. A transform is undone only by
an extension in the caller's registry.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Final

import torch

from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES, find_tensor, is_stored
from aioflux.checkpoint._load.copies import as_elements, narrow
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint._load.copies import TensorTarget
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem

_TERMINAL_CODE: Final = re.compile(r"\x1b\[[0-9;]*m")
_TRUE: Final = {"1", "y", "yes", "true"}
"""Values of the environment variables of torch that turn a setting on."""
_MAX_RATIO: Final = 1024
_MIN_BOUND_BYTES: Final = 64 * 1024 * 1024
"""With its transforms undone, a value may have `_MAX_RATIO` times its stored bytes, or
`_MIN_BOUND_BYTES` if that is more. For a tensor, the bound is the size in the metadata."""

_ZIP_BYTES: Final = 64 * 1024
"""Upper bound for the bytes of a zip in addition to the tensor's memory."""


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
