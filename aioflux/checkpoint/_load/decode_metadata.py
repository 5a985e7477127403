"""Decoder of DCP's metadata that runs no code from the pickle.

The metadata of torch 2.0 to 2.13 consists of nine classes, torch.Size, dtypes, layouts and plain
values. The decoder creates instances of these classes itself, and checks each of their fields. It
rejects a pickle with any other global, and imports and calls nothing that a pickle names.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Collection
from pathlib import PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, Final, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aioflux.checkpoint._format.safe_pickle import AllowedGlobals, PickleError, run_pickle
from aioflux.errors import CheckpointCorruptError

T = TypeVar("T")

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_OLD_METADATA: Final = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of TensorProperties before torch 2.3."""

_MAX_DIMENSIONS: Final = 64
_MAX_SIZE: Final = 2**62


class _Path:
    """Replacement for the classes of pathlib: Linux cannot create a WindowsPath, for example."""


_CLASSES: Final[dict[tuple[str, str], Any]] = {
    **{
        (_METADATA, kind.__name__): kind
        for kind in (
            Metadata,
            MetadataIndex,
            StorageMeta,
            BytesStorageMetadata,
            ChunkStorageMetadata,
            TensorProperties,
            TensorStorageMetadata,
            _MEM_FORMAT_ENCODING,
        )
    },
    (_OLD_METADATA, "TensorProperties"): TensorProperties,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.layout,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): _Path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}

_DTYPES: Final = {name: value for name, value in vars(torch).items() if type(value) is torch.dtype}
_LAYOUTS: Final = {str(item): item for item in vars(torch).values() if type(item) is torch.layout}
_ENCODINGS: Final = {encoding.value: encoding for encoding in _MEM_FORMAT_ENCODING}

_FIELDS: Final[dict[type, dict[str, Collection[type]]]] = {
    Metadata: {
        "state_dict_metadata": {dict, OrderedDict},
        "planner_data": (),
        "storage_data": {dict, OrderedDict, NoneType},
        "storage_meta": {StorageMeta, NoneType},
        "version": {str, NoneType},
    },
    MetadataIndex: {"fqn": {str}, "offset": {torch.Size, NoneType}, "index": {int, NoneType}},
    StorageMeta: {
        "checkpoint_id": {str, NoneType},
        "save_id": {str, NoneType},
        "load_id": {str, NoneType},
        "modules": {list},
    },
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": {torch.Size}, "sizes": {torch.Size}},
    TensorProperties: {},
    TensorStorageMetadata: {
        "properties": {TensorProperties},
        "size": {torch.Size},
        "chunks": {list},
    },
    _StorageInfo: {
        "relative_path": {str},
        "offset": {int},
        "length": {int},
        "transform_descriptors": {list, NoneType},
    },
}
"""For each class: its fields, and the types that each field may have; () means any type.

An int must be a count, 0 or more. A list must contain strings, except for
`TensorStorageMetadata.chunks`, a list of parts."""

_REQUIRED: Final = {
    MetadataIndex: {"fqn"},
    Metadata: {"state_dict_metadata"},
    ChunkStorageMetadata: {"offsets", "sizes"},
    TensorStorageMetadata: {"properties", "size", "chunks"},
    _StorageInfo: {"relative_path", "offset", "length"},
}


class _MetadataGlobals(AllowedGlobals):
    """The globals in the pickle of `Metadata`."""

    def find(self, module: str, name: str) -> Any:
        target = _CLASSES.get((module, name))
        if target is None and module == "torch":
            target = _DTYPES.get(name)
        return super().find(module, name) if target is None else target

    def call(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if target is torch.Size:
            return _size(*_only(arguments))
        if target is torch.layout:
            return _lookup(_LAYOUTS, _only(arguments), "layout")
        if target is _MEM_FORMAT_ENCODING:
            return _lookup(_ENCODINGS, _only(arguments), "memory format")
        if target is OrderedDict and not arguments:
            return OrderedDict()
        if target is _Path and all(type(part) is str for part in arguments):
            return _path(arguments)
        return super().call(target, arguments)

    def create(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if arguments or type(target) is not type or target not in _FIELDS:
            return super().create(target, arguments)
        return object.__new__(target)

    def set_state(self, instance: Any, state: Any) -> None:
        kind = type(instance)
        if kind not in _FIELDS or instance.__dict__:
            super().set_state(instance, state)
        if kind is TensorProperties:
            _set_properties(instance, state)
            return
        fields = _FIELDS[kind]
        if type(state) is not dict or not _REQUIRED.get(kind, set()) <= state.keys():
            raise PickleError(f"a {kind.__name__} is incomplete")
        for name, value in state.items():
            if name not in fields or not _is_valid(kind, value, fields[name]):
                raise PickleError(f"a {kind.__name__} has an invalid field")
        instance.__dict__.update(state)

    def is_key(self, value: Any) -> bool:
        return type(value) is MetadataIndex and "fqn" in value.__dict__


def _is_valid(owner: type, value: Any, kinds: Collection[type]) -> bool:
    """Return whether a field of the class `owner` may have this value."""
    if not kinds:
        return True
    if type(value) is list and owner is not TensorStorageMetadata:
        return list in kinds and all(type(text) is str for text in value)
    return type(value) in kinds and (type(value) is not int or _is_count(value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _only(arguments: tuple[Any, ...]) -> tuple[Any]:
    if len(arguments) != 1:
        raise PickleError(f"a call in the pickle has {len(arguments)} arguments instead of one")
    return (arguments[0],)


def _size(value: Any) -> torch.Size:
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS or not all(map(_is_count, value)):
        raise PickleError("a torch.Size is not a tuple of counts")
    return torch.Size(value)


def _lookup(table: dict[Any, T], argument: tuple[Any], kind: str) -> T:
    if type(argument[0]) not in {str, int} or argument[0] not in table:
        raise PickleError(f"it names an unknown {kind}")
    return table[argument[0]]


def _path(parts: tuple[Any, ...]) -> str:
    kind = PureWindowsPath if parts and "\\" in parts[0] else PurePosixPath
    return str(kind(*parts))


def _set_properties(instance: TensorProperties, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or tuple(map(type, state)) != kinds:
        raise PickleError("the properties of a tensor are invalid")
    instance.__setstate__(state)  # type: ignore[no-untyped-call]


def decode_metadata(data: bytes, *, uri: str, is_partial: bool = False) -> Metadata:
    """Return the metadata from the pickle at the beginning of `data`.

    If `is_partial` is True, it is the metadata of one rank, and may lack parts of tensors.

    Raises:
        CheckpointCorruptError: The pickle is damaged, contradicts itself, or contains anything but
            metadata. No code in it was run.
    """
    try:
        metadata, _ = run_pickle(data, _MetadataGlobals())
        _check(metadata, is_partial=is_partial)
    except PickleError as exc:
        raise CheckpointCorruptError(
            f"{uri} has no valid metadata: {exc}; no code was run; load an earlier checkpoint"
        ) from exc
    return metadata  # type: ignore[no-any-return]


def _check(metadata: Any, *, is_partial: bool) -> None:
    """Raise PickleError if metadata contradicts itself."""
    if type(metadata) is not Metadata or "state_dict_metadata" not in metadata.__dict__:
        raise PickleError("it is not a Metadata")
    kinds = {TensorStorageMetadata, BytesStorageMetadata}
    for name, stored in metadata.state_dict_metadata.items():
        if type(name) is not str or type(stored) not in kinds:
            raise PickleError("an entry of state_dict_metadata is invalid")
        if type(stored) is TensorStorageMetadata:
            _check_tensor(name, stored, is_partial=is_partial)
    for index, info in (metadata.storage_data or {}).items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo or not info.__dict__:
            raise PickleError("an entry of storage_data is invalid")
        if not _is_below(info.relative_path):
            raise PickleError("it names an object outside of the checkpoint")


def _check_tensor(name: str, tensor: TensorStorageMetadata, *, is_partial: bool) -> None:
    if "chunks" not in tensor.__dict__ or not tensor.properties.__dict__:
        raise PickleError("a tensor is incomplete")
    if math.prod(tensor.size) > _MAX_SIZE:
        raise PickleError(f"{name[:200]!r} is too large")
    for chunk in tensor.chunks:
        if type(chunk) is not ChunkStorageMetadata or not chunk.__dict__:
            raise PickleError("a part of a tensor is invalid")
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
            offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        ):
            raise PickleError(f"a part of {name[:200]!r} is outside of the tensor")
    parts = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks}
    parts = {part for part in parts if math.prod(part[1])}
    if not _are_disjoint(sorted(parts)):
        raise PickleError(f"parts of {name[:200]!r} overlap")
    if not is_partial and sum(math.prod(sizes) for _, sizes in parts) < math.prod(tensor.size):
        raise PickleError(f"parts of {name[:200]!r} are missing")


def _are_disjoint(parts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether no two parts share an element. Each part is (offsets, sizes).

    The list is sorted. A part is compared with the earlier parts that reach its first row. These
    are few if the tensor is sharded by rows, and one row of the grid if it is sharded as a grid.
    """
    if parts and not parts[0][0]:
        return len(parts) == 1  # a tensor without dimensions
    reaching: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in parts:
        reaching = [earlier for earlier in reaching if earlier[0][0] + earlier[1][0] > offsets[0]]
        for other_offsets, other_sizes in reaching:
            if all(
                start < other + length and other < start + size
                for start, size, other, length in zip(
                    offsets, sizes, other_offsets, other_sizes, strict=True
                )
            ):
                return False
        reaching.append((offsets, sizes))
    return True


_OUTSIDE = re.compile(r"(?:^|[/\\])\.\.?(?:[/\\]|$)|^[/\\]|//|^$|\0")


def _is_below(key: str) -> bool:
    """Return whether a key is below its prefix, as a key and as a path of any system."""
    return _OUTSIDE.search(key) is None
