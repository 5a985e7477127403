"""The metadata of a distributed checkpoint, decoded without running code of its pickle.

The metadata of torch 2.0 to 2.13 holds nine classes, torch.Size, dtypes, layouts and plain values.
They are created here from fields that are checked one by one. A pickle with any other global is
rejected, and no global is imported or called.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from pathlib import PurePosixPath, PureWindowsPath
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar

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

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["decode_metadata"]

T = TypeVar("T")

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_OLD: Final = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of TensorProperties before torch 2.3."""

_MAX_DIMENSIONS: Final = 64
_MAX_SIZE: Final = 2**62


class _Path:
    """Replacement for the classes of pathlib, which cannot all be created on every system."""


_CLASSES: Final[dict[tuple[str, str], Any]] = {
    **{
        (_METADATA, each.__name__): each
        for each in (
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
    (_OLD, "TensorProperties"): TensorProperties,
    (_OLD, "MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
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

_DTYPES: Final = {name: each for name, each in vars(torch).items() if type(each) is torch.dtype}
_LAYOUTS: Final = {str(each): each for each in vars(torch).values() if type(each) is torch.layout}
_ENCODINGS: Final = {each.value: each for each in _MEM_FORMAT_ENCODING}

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
"""Classes of the objects that are created, and the types of each field; () is any.

Numbers are counts, and lists hold text, except for those of parts of tensors."""

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
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = _DTYPES.get(name)
        return super().find(module, name) if found is None else found

    def call(self, found: Any, arguments: tuple[Any, ...]) -> Any:
        if found is torch.Size:
            return _size(*_only(arguments))
        if found is torch.layout:
            return _lookup(_LAYOUTS, _only(arguments), "layout")
        if found is _MEM_FORMAT_ENCODING:
            return _lookup(_ENCODINGS, _only(arguments), "memory format")
        if found is OrderedDict and not arguments:
            return OrderedDict()
        if found is _Path and all(type(part) is str for part in arguments):
            return _path(arguments)
        return super().call(found, arguments)

    def create(self, found: Any, arguments: tuple[Any, ...]) -> Any:
        if arguments or type(found) is not type or found not in _FIELDS:
            return super().create(found, arguments)
        return object.__new__(found)

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
    """Return whether a field may have a value."""
    if not kinds:
        return True
    if type(value) is list and owner is not TensorStorageMetadata:
        return list in kinds and all(type(each) is str for each in value)
    return type(value) in kinds and (type(value) is not int or _is_count(value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _only(arguments: tuple[Any, ...]) -> tuple[Any]:
    if len(arguments) != 1:
        raise PickleError(f"it calls with {len(arguments)} arguments instead of one")
    return (arguments[0],)


def _size(value: Any) -> torch.Size:
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS or not all(map(_is_count, value)):
        raise PickleError("a size is no tuple of counts")
    return torch.Size(value)


def _lookup(table: dict[Any, T], argument: tuple[Any], what: str) -> T:
    if type(argument[0]) not in {str, int} or argument[0] not in table:
        raise PickleError(f"it names an unknown {what}")
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
    """Return the metadata whose pickle `data` begins with.

    Metadata of one rank, `is_partial`, may hold only parts of tensors.

    Raises:
        CheckpointCorruptError: It is damaged, contradicts itself, or holds more than metadata;
            no code in it was run.
    """
    try:
        metadata, _ = run_pickle(data, _MetadataGlobals())
        _check(metadata, is_partial=is_partial)
    except PickleError as exc:
        raise CheckpointCorruptError(
            f"{uri} holds no valid metadata: {exc}; nothing was run; load an earlier checkpoint"
        ) from exc
    return metadata  # type: ignore[no-any-return]


def _check(metadata: Any, *, is_partial: bool) -> None:
    """Raise PickleError if metadata contradicts itself."""
    if type(metadata) is not Metadata or "state_dict_metadata" not in metadata.__dict__:
        raise PickleError("it is no Metadata")
    for name, each in metadata.state_dict_metadata.items():
        if type(name) is not str or type(each) not in {TensorStorageMetadata, BytesStorageMetadata}:
            raise PickleError("an entry of state_dict_metadata is invalid")
        if type(each) is TensorStorageMetadata:
            _check_tensor(name, each, is_partial=is_partial)
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
    for each in tensor.chunks:
        if type(each) is not ChunkStorageMetadata or not each.__dict__:
            raise PickleError("a part of a tensor is invalid")
        if not len(each.offsets) == len(each.sizes) == len(tensor.size) or any(
            offset + size > whole
            for offset, size, whole in zip(each.offsets, each.sizes, tensor.size, strict=True)
        ):
            raise PickleError(f"a part of {name[:200]!r} is outside of it")
    parts = {(tuple(each.offsets), tuple(each.sizes)) for each in tensor.chunks}
    parts = {part for part in parts if math.prod(part[1])}
    if not _are_disjoint(sorted(parts)):
        raise PickleError(f"parts of {name[:200]!r} overlap")
    if not is_partial and sum(math.prod(sizes) for _, sizes in parts) < math.prod(tensor.size):
        raise PickleError(f"parts of {name[:200]!r} are missing")


def _are_disjoint(parts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether no two parts, sorted by their offsets, share an element.

    Compares each with those before it that reach its first row: few if a tensor is sharded by rows,
    and those of one row of a grid otherwise.
    """
    if parts and not parts[0][0]:
        return len(parts) == 1  # a number
    reaching: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in parts:
        reaching = [each for each in reaching if each[0][0] + each[1][0] > offsets[0]]
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
    """Return whether a key stays below its prefix, also as a path."""
    return _OUTSIDE.search(key) is None
