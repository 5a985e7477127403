"""Whole items to what they hold: values, and tensors whose memory cannot be read by ranges.

Nothing that an item says is executed: `torch.load` reads with `weights_only`, and transforms are
those of a registry that the caller filled.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import IO, TYPE_CHECKING, Any, Final

import torch

from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES, find_tensor
from aioflux.checkpoint._load.units import as_elements, narrow
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint._load.source import Stored
    from aioflux.checkpoint._load.units import Wanted

__all__ = ["as_bytes", "copy_item", "default_registry", "find_memory", "load_value", "untransform"]

_MAX_RATIO: Final = 1024
_MIN_BOUND_BYTES: Final = 64 * 1024 * 1024
"""A value that is transformed becomes at most so many times as long, or so long."""

_ZIP_BYTES: Final = 64 * 1024
"""What a zip adds to the tensor in it, at most."""


def default_registry() -> ExtensionRegistry:
    """Return the transforms that are known without being told: torch's own, and ours."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint.compression import ZStandard

    registry = ExtensionRegistry()
    registry.register(ZStandard)
    return registry


def as_bytes(data: torch.Tensor) -> memoryview:
    """Return a flat tensor of bytes as what files and pickles take."""
    return data.numpy().data


def find_memory(head: torch.Tensor, wanted: Wanted, uri: str) -> int | None:
    """Return where in its item the memory of a wanted tensor begins, None where that is not told.

    Raises:
        CheckpointCorruptError: The item holds another tensor than the metadata says.
    """
    found = find_tensor(bytes(as_bytes(head[:HEAD_SIZE_BYTES])))
    if found is None:
        return None
    sizes, dtype = wanted.shape
    if found.shape != sizes or f"torch.{found.dtype}" != str(dtype):
        raise _corrupt(uri, wanted, f"it is {found.dtype} of {found.shape}, not {dtype} of {sizes}")
    if (
        found.start + wanted.shape.num_bytes > wanted.stored.length
        and not wanted.stored.descriptors
    ):
        raise _corrupt(uri, wanted, "it is longer than its item")
    return found.start


def copy_item(data: torch.Tensor, wanted: Wanted, uri: str, registry: ExtensionRegistry) -> None:
    """Copy what is wanted out of all bytes of its item.

    Raises:
        CheckpointCorruptError: The item holds something else.
    """
    if wanted.stored.descriptors:
        bound = wanted.shape.num_bytes + _ZIP_BYTES
        data = untransform(data, wanted.name, wanted.stored, uri, registry, bound=bound)
    start = find_memory(data, wanted, uri)
    sizes, dtype = wanted.shape
    if start is None:
        tensor = _load_tensor(data, wanted, uri)
    else:
        memory = data[start : start + wanted.shape.num_bytes]
        if memory.numel() != wanted.shape.num_bytes:
            raise _corrupt(uri, wanted, "it ends early")
        tensor = as_elements(memory, dtype).view(sizes)
    wanted.target.copy_(narrow(tensor, wanted.offsets, wanted.lengths))


def _load_tensor(data: torch.Tensor, wanted: Wanted, uri: str) -> torch.Tensor:
    try:
        _refuse_packed(as_bytes(data))
        tensor = torch.load(io.BytesIO(as_bytes(data)), map_location="cpu", weights_only=True)
    except Exception as exc:  # of many kinds, for whatever is wrong with the bytes
        raise _corrupt(uri, wanted, f"torch.load says {_first_line(exc)}") from exc
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != wanted.shape.sizes:
        raise _corrupt(uri, wanted, f"it holds no tensor of {wanted.shape.sizes}")
    return tensor


def untransform(
    data: torch.Tensor,
    name: str,
    stored: Stored,
    uri: str,
    registry: ExtensionRegistry,
    *,
    bound: int | None = None,
) -> torch.Tensor:
    """Return what an item was before its transforms.

    Args:
        data: All bytes of the item.
        name: What it holds, for errors.
        stored: Where it lies, and its transforms.
        uri: Of its object, for errors.
        registry: Knows the transforms.
        bound: Bytes that it was, at most; a multiple of what is stored by default.

    Raises:
        CheckpointError: A transform is unknown.
        CheckpointCorruptError: It cannot be undone, or gives more than can be.
    """
    if bound is None:
        bound = max(_MIN_BOUND_BYTES, _MAX_RATIO * stored.length)
    try:
        extensions: Sequence[Any] = registry.from_descriptor_list(stored.descriptors)
    except ValueError as exc:
        raise CheckpointError(
            f"{name!r} in {uri} is transformed by {', '.join(stored.descriptors)}, which this load "
            f"does not know: {exc}; register it, and pass the registry as extension_registry="
        ) from exc
    stream: IO[bytes] = io.BytesIO(as_bytes(data))
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        whole = _read_bounded(stream, bound)
    except Exception as exc:  # of the transform's own kinds
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
            raise ValueError(f"it gives more than {bound} bytes")
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

    Args:
        data: All bytes of the item.
        name: Of the value, for errors.
        uri: Of its object, for errors.
        map_location: Device of tensors in it.
        weights_only: Refuse a pickle that asks for more than tensors and plain values.

    Raises:
        CheckpointError: Its pickle asks for more than `weights_only` lets it have.
        CheckpointCorruptError: It cannot be read.
    """
    try:
        _refuse_packed(data)
        file = io.BytesIO(data)
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as exc:
        raise CheckpointError(
            f"{name!r} in {uri} is not loaded: its pickle holds what weights_only=True refuses "
            f"({_first_line(exc)}); nothing of it was executed. Name its classes to "
            "torch.serialization.add_safe_globals, or pass weights_only=False for checkpoints that "
            "you trust as you trust code"
        ) from exc
    except Exception as exc:  # of many kinds, for whatever is wrong with the bytes
        raise CheckpointCorruptError(
            f"{uri} is damaged: {name!r} cannot be read: {_first_line(exc)}; load an earlier "
            "checkpoint"
        ) from exc


def _refuse_packed(data: memoryview) -> None:
    """Raise an error for a zip that holds more than it has bytes: torch.save packs nothing.

    Raises:
        ValueError: It does.
        zipfile.BadZipFile: It is no whole zip.
    """
    if bytes(data[:2]) != b"PK":
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    is_packed = any(each.compress_type != zipfile.ZIP_STORED for each in entries)
    if is_packed or sum(each.file_size for each in entries) > data.nbytes:
        raise ValueError("its zip is packed, which torch.save never does")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _corrupt(uri: str, wanted: Wanted, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{uri} is damaged: {wanted.name!r} in it is not what the metadata says: {what}; load an "
        "earlier checkpoint"
    )
