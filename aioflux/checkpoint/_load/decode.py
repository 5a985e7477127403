"""Decoding of whole items: values, and tensors whose memory cannot be read by ranges.

No item runs code: `torch.load` reads with `weights_only`, and transforms are those of a registry
that the caller filled.
"""

from __future__ import annotations

import io
import pickle
from typing import IO, TYPE_CHECKING, Any, Final

import torch

from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES, find_tensor
from aioflux.checkpoint._format.zip_records import is_stored
from aioflux.checkpoint._load.copies import as_elements, narrow
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint._load.copies import TensorTarget
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem

__all__ = ["as_bytes", "copy_item", "default_registry", "find_memory", "load_value", "untransform"]

_MAX_RATIO: Final = 1024
_MIN_BOUND_BYTES: Final = 64 * 1024 * 1024
"""An item may grow to this multiple of its stored bytes, or to this many bytes if that is more, as
its transforms are undone."""

_ZIP_BYTES: Final = 64 * 1024
"""Upper bound of the zip overhead of a tensor."""


def default_registry() -> ExtensionRegistry:
    """Return the registry of torch's own transforms and of `ZStandard`."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint.compression import ZStandard

    registry = ExtensionRegistry()
    registry.register(ZStandard)
    return registry


def as_bytes(data: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor of bytes."""
    return data.numpy().data


def find_memory(head: torch.Tensor, target: TensorTarget, uri: str) -> int | None:
    """Return the first byte of a tensor's memory in its item, or None if it is unknown.

    Raises:
        CheckpointCorruptError: The item holds another tensor than the metadata says.
    """
    found = find_tensor(bytes(as_bytes(head[:HEAD_SIZE_BYTES])))
    if found is None:
        return None
    sizes, dtype = target.shape
    if found.shape != sizes or f"torch.{found.dtype}" != str(dtype):
        what = f"it is {found.dtype} of {found.shape}, not {dtype} of {sizes}"
        raise _corrupt(uri, target, what)
    if (
        found.start + target.shape.num_bytes > target.stored.length
        and not target.stored.descriptors
    ):
        raise _corrupt(uri, target, "it is longer than its item")
    return found.start


def copy_item(
    data: torch.Tensor, target: TensorTarget, uri: str, registry: ExtensionRegistry
) -> None:
    """Copy a part of a tensor from its whole item.

    Raises:
        CheckpointCorruptError: The item holds another tensor.
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
    except Exception as exc:  # of any class, depending on the damage
        raise _corrupt(uri, target, f"torch.load raised {_first_line(exc)}") from exc
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != target.shape.sizes:
        raise _corrupt(uri, target, f"it holds no tensor of {target.shape.sizes}")
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
    """Undo the transforms of an item, and return its bytes.

    At most `bound` of them; by default a multiple of the stored bytes.

    Raises:
        CheckpointError: A transform is unknown.
        CheckpointCorruptError: One cannot be undone, or its result is too long.
    """
    if bound is None:
        bound = max(_MIN_BOUND_BYTES, _MAX_RATIO * stored.length)
    try:
        extensions: Sequence[Any] = registry.from_descriptor_list(stored.descriptors)
    except ValueError as exc:
        raise CheckpointError(
            f"{name!r} in {uri} is transformed by {', '.join(stored.descriptors)}, which is not "
            f"registered: {exc}; register it, and pass the registry as extension_registry="
        ) from exc
    stream: IO[bytes] = io.BytesIO(as_bytes(data))
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        whole = _read_bounded(stream, bound)
    except Exception as exc:  # each transform raises its own classes
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
            raise ValueError(f"it is longer than {bound} bytes")
    return whole


def load_value(
    data: memoryview,
    name: str,
    uri: str,
    *,
    map_location: str | torch.device = "cpu",
    weights_only: bool = True,
) -> Any:
    """Return the value of an item that holds no tensor.

    Raises:
        CheckpointError: `weights_only` is True, and its pickle has objects of other classes.
        CheckpointCorruptError: It cannot be read.
    """
    try:
        _require_plain_zip(data)
        file = io.BytesIO(data)
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as exc:
        raise CheckpointError(
            f"{name!r} in {uri} is not loaded: weights_only=True rejects its pickle "
            f"({_first_line(exc)}); no code in it was run. Pass its classes to "
            "torch.serialization.add_safe_globals, or pass weights_only=False for checkpoints that "
            "you trust as you trust code"
        ) from exc
    except Exception as exc:  # of any class, depending on the damage
        raise CheckpointCorruptError(
            f"{uri} is damaged: {name!r} cannot be read: {_first_line(exc)}; load an earlier "
            "checkpoint"
        ) from exc


def _require_plain_zip(data: memoryview) -> None:
    """Raise an error if the entries of a zip are compressed, or longer than the zip."""
    if bytes(data[:2]) == b"PK" and not is_stored(io.BytesIO(data), data.nbytes):
        raise ValueError("its zip is compressed, which torch.save never does")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _corrupt(uri: str, target: TensorTarget, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{uri} is damaged: {target.name!r} in it differs from the metadata: {what}; load an "
        "earlier checkpoint"
    )
