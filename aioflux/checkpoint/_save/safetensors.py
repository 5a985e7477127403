"""The layout of safetensors: which tensor goes where, and the headers. Pure.

    8 bytes: size of the header | header, JSON padded with spaces | tensors, without gaps

Source: github.com/huggingface/safetensors, "Format". A tensor is whole in one object. Those that
one rank holds whole go to objects of that rank. Those that ranks share are put together by the
coordinator: on the service where the parts are rows, and large, and by itself otherwise.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from aioflux.checkpoint._format.commit import plan_block_size
from aioflux.checkpoint._save.object_plan import item_bytes, plan_objects
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from aioflux.checkpoint._format.commit import Commit

__all__ = [
    "DTYPES",
    "Kind",
    "Layout",
    "RankLayout",
    "Role",
    "Tensor",
    "dump_metadata",
    "is_storable",
    "lay_out",
    "load_metadata",
    "model_key",
    "plan_ranks",
    "tensor_of",
]

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that every reader of safetensors knows; tensors of others are stored as values are."""

_MIN_COMPOSED_BYTES: Final = 32 * 1024 * 1024
"""Smaller tensors go through the coordinator: an object for each part would cost more."""

_METADATA: Final = "metadata"


class Tensor(NamedTuple):
    """A whole tensor."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class Kind(Enum):
    """How a tensor, or a part of one, gets to its object."""

    WHOLE = "whole"
    """Its rank writes the object."""
    COMPOSED = "composed"
    """The service puts its rows together."""
    ASSEMBLED = "assembled"
    """The coordinator reads its parts, and writes the object."""


class Role(NamedTuple):
    """What becomes of one item of a plan."""

    kind: Kind
    number: int
    """Number of its object among those of the checkpoint, from 1."""
    offset: int = 0
    """First byte of the part in its object, where that is composed."""
    block_size: int = 0
    """Bytes that are verified at once in that object."""


@dataclass(frozen=True)
class RankLayout:
    """Where one rank's tensors go; what is not in it is stored as values are."""

    num_objects: int
    """Objects of the whole checkpoint."""
    roles: Mapping[MetadataIndex, Role] = field(default_factory=dict)


class Layout(NamedTuple):
    """One object."""

    header: bytes
    """What stands before the tensors."""
    offsets: Mapping[str, int]
    """First byte of each tensor in the object, in order."""
    size: int
    """Bytes of the object."""


def model_key(save_id: str, number: int, num_objects: int) -> str:
    """Return the key of an object, below the checkpoint's prefix."""
    return f"model-{save_id}-{number:05d}-of-{num_objects:05d}.safetensors"


def is_storable(item: WriteItem) -> bool:
    """Tell whether safetensors can hold what an item is part of."""
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        return False
    return data.properties.dtype in DTYPES and data.properties.layout == torch.strided


def tensor_of(item: WriteItem) -> Tensor:
    """Return the tensor that an item is, or is part of."""
    data = item.tensor_data
    assert data is not None
    return Tensor(item.index.fqn, data.properties.dtype, tuple(data.size))


def lay_out(tensors: Iterable[Tensor]) -> Layout:
    """Return how an object of these tensors begins, and where each of them lies.

    Large elements come first, so that all are aligned to their size, and tensors without any last.
    """
    ordered = sorted(tensors, key=lambda each: (not each.num_bytes, -each.dtype.itemsize))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = dict[str, int](), 0
    for each in ordered:
        starts[each.name] = at
        at += each.num_bytes
        entries[each.name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.sizes),
            "data_offsets": [starts[each.name], at],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: start + len(header) for name, start in starts.items()}
    return Layout(header, offsets, len(header) + at)


def plan_ranks(plans: Sequence[Sequence[WriteItem]], objects_per_rank: int) -> list[RankLayout]:
    """Return where the tensors of each rank go.

    Args:
        plans: Items of all ranks, no part twice.
        objects_per_rank: Objects of each rank at most, and of all ranks together for what they
            share as many times that.
    """
    roles: list[dict[MetadataIndex, Role]] = [{} for _ in plans]
    parts: dict[str, list[tuple[int, WriteItem]]] = {}
    num_objects = 0
    # One rank may hold all rows of a tensor, and the others none of them.
    cut = {
        item.index.fqn
        for items in plans
        for item in items
        if is_storable(item) and not _is_whole(item)
    }
    for rank, items in enumerate(plans):
        storable = [item for item in items if is_storable(item)]
        whole = [item for item in storable if item.index.fqn not in cut]
        for each in plan_objects(whole, objects_per_rank):
            num_objects += 1
            roles[rank] |= {item.index: Role(Kind.WHOLE, num_objects) for item in each}
        for item in storable:
            if item.index.fqn in cut:
                parts.setdefault(item.index.fqn, []).append((rank, item))
    composed: dict[str, list[tuple[int, WriteItem]]] = {}
    assembled: list[str] = []
    for name, shared in parts.items():
        rows = sorted(shared, key=lambda each: _offsets(each[1]))
        if _are_rows([item for _, item in rows]):
            composed[name] = rows
        else:
            assembled.append(name)
    for names in _groups(composed, objects_per_rank * len(plans)):
        num_objects += 1
        layout = lay_out(tensor_of(composed[name][0][1]) for name in names)
        for name in names:
            at = layout.offsets[name]
            for rank, item in composed[name]:
                role = Role(Kind.COMPOSED, num_objects, at, plan_block_size(layout.size))
                roles[rank][item.index] = role
                at += item_bytes(item)
    if assembled:
        num_objects += 1
        for name in assembled:
            for rank, item in parts[name]:
                roles[rank][item.index] = Role(Kind.ASSEMBLED, num_objects)
    return [RankLayout(num_objects, each) for each in roles]


def _offsets(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)


def _is_whole(item: WriteItem) -> bool:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes == data.size


def _are_rows(items: Sequence[WriteItem]) -> bool:
    """Tell whether items, in order, are the rows of one large tensor from the first to the last."""
    tensor, row = tensor_of(items[0]), 0
    if tensor.num_bytes < _MIN_COMPOSED_BYTES:
        return False
    for item in items:
        assert item.tensor_data is not None
        part = item.tensor_data.chunk
        if part.offsets[0] != row or any(part.offsets[1:]):
            return False
        if tuple(part.sizes[1:]) != tensor.sizes[1:]:
            return False
        row += part.sizes[0]
    return row == tensor.sizes[0]


def _groups(shared: Mapping[str, list[tuple[int, WriteItem]]], num_groups: int) -> list[list[str]]:
    """Spread tensors over so many objects at most, balanced by size."""
    first = {name: parts[0][1] for name, parts in shared.items()}
    sizes = {name: tensor_of(item).num_bytes for name, item in first.items()}
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        least = loads.index(min(loads))
        groups[least].append(name)
        loads[least] += sizes[name]
    return [sorted(each, key=list(sizes).index) for each in groups if each]


def dump_metadata(pickled: bytes) -> dict[str, str]:
    """Return what a commit keeps beside: the pickle of DCP's metadata."""
    return {_METADATA: base64.b64encode(pickled).decode()}


def load_metadata(commit: Commit, *, uri: str) -> bytes:
    """Return the pickle of DCP's metadata that a commit keeps beside.

    Raises:
        CheckpointCorruptError: It keeps none.
    """
    try:
        return base64.b64decode(commit.extra[_METADATA], validate=True)
    except (KeyError, ValueError) as exc:
        raise CheckpointCorruptError(
            f"{uri} is damaged: it holds no metadata of its tensors; load an earlier checkpoint"
        ) from exc
