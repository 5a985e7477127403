"""Object plans: the data object of each item, and the rank that writes it. Pure.

In the safetensors layout each tensor is stored whole in one object. A tensor that is not sharded is
written by the rank that DCP assigns it to. The parts of a sharded tensor are uploaded by their
ranks, and the coordinator joins them. If the tensor is large and its parts are rows, the service
composes them. Otherwise the coordinator reads the parts and writes the tensor.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.commit import plan_block_size
from aioflux.checkpoint._format.safetensors import DTYPES, TensorSpec, plan_layout

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_MIN_COMPOSED_BYTES: Final = 32 * 1024 * 1024
"""Smaller tensors are not composed. Composing needs an object for each part of a tensor, which
would cost more than reading the parts of all small tensors from one object of each rank."""


class WriteKind(Enum):
    """Ways to write a tensor to its object."""

    WHOLE = "whole"
    """A rank that has the whole tensor writes the object."""
    COMPOSED = "composed"
    """The service composes the object from rows that the ranks uploaded."""
    ASSEMBLED = "assembled"
    """The coordinator reads the parts that the ranks uploaded, and writes the object."""


class ItemPlacement(NamedTuple):
    """The object of an item, and the way to write it."""

    kind: WriteKind
    object_number: int
    """Number of the object in the checkpoint, counted from 1."""
    offset: int = 0
    """First byte of the item in a composed object."""
    block_size: int = 0
    """Block size of a composed object, in bytes."""


@dataclass(frozen=True)
class RankLayout:
    """The placements of one rank's items in the safetensors layout.

    Items without a placement are stored in objects of the layout of DCP.
    """

    num_objects: int
    """Number of safetensors objects of the whole checkpoint."""
    placements: Mapping[MetadataIndex, ItemPlacement] = field(default_factory=dict)


@dataclass
class RankPlacement:
    """The `storage_data` of a rank's plan; the coordinator sends it to the rank.

    A planner that caches plans returns the same plan and the same `RankPlacement` for every save.
    So each rank derives the save id from its number of earlier saves with this plan. Ranks that
    have taken part in the same saves derive the same id.
    """

    save_id: str
    """Save id of the first save with this plan."""
    rank: int
    layout: RankLayout | None = None
    """None in the layout of DCP."""
    num_uses: int = 0
    """Number of saves that used this placement in this process."""

    def use(self) -> str:
        """Count one more save, and return its save id."""
        number, self.num_uses = self.num_uses, self.num_uses + 1
        if not number:
            return self.save_id
        time, _, token = self.save_id.rpartition("-")
        return f"{time}-{crc32c(f'{token}/{number}'.encode()):08x}"


def item_bytes(item: WriteItem) -> int:
    """Return the size of a tensor item in bytes; 0 for a value that is not a tensor."""
    data = item.tensor_data
    if data is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def plan_objects(items: Sequence[WriteItem], num_objects: int) -> list[list[WriteItem]]:
    """Spread items over at most `num_objects` objects of about the same size, none of them empty.

    In an object, values that are not tensors come first, and tensors have the order of the plan.
    The plan has the order of the state, so neighbours in the state are neighbours in the object,
    and few reads load them.
    """
    order = {id(item): number for number, item in enumerate(items)}
    heap = [(0, number) for number in range(num_objects)]
    objects: list[list[WriteItem]] = [[] for _ in range(num_objects)]
    for item in sorted(items, key=item_bytes, reverse=True):
        num_bytes, number = heapq.heappop(heap)
        objects[number].append(item)
        # Count one byte more for each item, so that values without a size are spread, too.
        heapq.heappush(heap, (num_bytes + item_bytes(item) + 1, number))
    for content in objects:
        content.sort(key=lambda item: (item.type != WriteItemType.BYTE_IO, order[id(item)]))
    return [content for content in objects if content]


def _is_storable(item: WriteItem) -> bool:
    """Return whether an item is a tensor that safetensors can store."""
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        return False
    return _dtype_name(data.properties.dtype) in DTYPES and data.properties.layout == torch.strided


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_of(item: WriteItem) -> TensorSpec:
    """Return the spec of the whole tensor; the item is this tensor or a part of it."""
    data = item.tensor_data
    assert data is not None
    return TensorSpec(item.index.fqn, _dtype_name(data.properties.dtype), tuple(data.size))


def plan_ranks(plans: Sequence[Sequence[WriteItem]], objects_per_rank: int) -> list[RankLayout]:
    """Return the placements of each rank's tensors.

    Args:
        plans: The items of each rank. No part of a tensor occurs twice.
        objects_per_rank: Maximum number of objects of whole tensors that a rank writes. The service
            composes at most this number of objects for each rank, too.
    """
    placements: list[dict[MetadataIndex, ItemPlacement]] = [{} for _ in plans]
    parts: dict[str, list[tuple[int, WriteItem]]] = {}
    num_objects = 0
    # If one rank has all rows of a sharded tensor, its item looks whole. Then only the empty parts
    # of other ranks show that the tensor is sharded, so compare names.
    sharded = {
        item.index.fqn
        for items in plans
        for item in items
        if _is_storable(item) and not _is_whole(item)
    }
    for rank, items in enumerate(plans):
        storable = [item for item in items if _is_storable(item)]
        whole = [item for item in storable if item.index.fqn not in sharded]
        for content in plan_objects(whole, objects_per_rank):
            num_objects += 1
            placement = ItemPlacement(WriteKind.WHOLE, num_objects)
            placements[rank] |= {item.index: placement for item in content}
        for item in storable:
            if item.index.fqn in sharded:
                parts.setdefault(item.index.fqn, []).append((rank, item))
    composed: dict[str, list[tuple[int, WriteItem]]] = {}
    assembled: list[str] = []
    for name, of_tensor in parts.items():
        rows = sorted(of_tensor, key=lambda part: _offsets(part[1]))
        if _are_rows([item for _, item in rows]):
            composed[name] = rows
        else:
            assembled.append(name)
    for names in _groups(composed, objects_per_rank * len(plans)):
        num_objects += 1
        layout = plan_layout(tensor_of(composed[name][0][1]) for name in names)
        block_size = plan_block_size(layout.size)
        for name in names:
            offset = layout.offsets[name]
            for rank, item in composed[name]:
                placement = ItemPlacement(WriteKind.COMPOSED, num_objects, offset, block_size)
                placements[rank][item.index] = placement
                offset += item_bytes(item)
    if assembled:
        num_objects += 1
        placement = ItemPlacement(WriteKind.ASSEMBLED, num_objects)
        for rank, item in (part for name in assembled for part in parts[name]):
            placements[rank][item.index] = placement
    return [RankLayout(num_objects, of_rank) for of_rank in placements]


def _offsets(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)


def _is_whole(item: WriteItem) -> bool:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes == data.size


def _are_rows(items: Sequence[WriteItem]) -> bool:
    """Return whether the items are all rows of one large tensor, in order."""
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


def _groups(tensors: Mapping[str, list[tuple[int, WriteItem]]], num_groups: int) -> list[list[str]]:
    """Spread tensors over at most `num_groups` groups of about the same size."""
    first = {name: parts[0][1] for name, parts in tensors.items()}
    sizes = {name: tensor_of(item).num_bytes for name, item in first.items()}
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        groups[least].append(name)
        loads[least] += sizes[name]
    return [sorted(group, key=list(sizes).index) for group in groups if group]
