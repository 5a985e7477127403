"""The plan of data objects: which item goes to which object, and what each rank receives. Pure.

In the safetensors layout no tensor is split over objects. A tensor that one rank holds whole goes
to an object of that rank. Sharded tensors are put together by the coordinator: large
tensors whose parts are rows are composed on the service, others are read and written again.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.commit import plan_block_size
from aioflux.checkpoint._format.safetensors import DTYPES, TensorSpec, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = [
    "ItemPlacement",
    "RankLayout",
    "RankPlacement",
    "WriteKind",
    "item_bytes",
    "plan_objects",
    "plan_ranks",
    "tensor_of",
]

_MIN_COMPOSED_BYTES: Final = 32 * 1024 * 1024
"""Smaller tensors go through the coordinator: an object for each part would cost more."""


class WriteKind(Enum):
    """The method by which a tensor, or a part of one, is written to its object."""

    WHOLE = "whole"
    """Its rank writes the object."""
    COMPOSED = "composed"
    """The service composes the object from rows."""
    ASSEMBLED = "assembled"
    """The coordinator reads the parts, and writes the object."""


class ItemPlacement(NamedTuple):
    """The object that an item of a plan goes to."""

    kind: WriteKind
    object_number: int
    """Number of the object among those of the checkpoint, from 1."""
    offset: int = 0
    """First byte of the part in a composed object."""
    block_size: int = 0
    """Bytes of a block of a composed object; each block has its own checksum."""


@dataclass(frozen=True)
class RankLayout:
    """The placements of one rank's tensors; items without one are stored like values."""

    num_objects: int
    """Objects of the whole checkpoint."""
    placements: Mapping[MetadataIndex, ItemPlacement] = field(default_factory=dict)


@dataclass
class RankPlacement:
    """The storage data of a rank's plan, sent by the coordinator to the rank.

    A planner that caches plans returns the same plan, with this in it, for every save. So each use
    derives a new save id from the number of uses, which is the same on all ranks.
    """

    save_id: str
    """Save id of the first save."""
    rank: int
    layout: RankLayout | None = None
    """None in the layout of DCP."""
    num_uses: int = 0
    """Saves that used it in this process."""

    def use(self) -> str:
        """Return the save id of the save that starts now."""
        number, self.num_uses = self.num_uses, self.num_uses + 1
        if not number:
            return self.save_id
        time, _, token = self.save_id.rpartition("-")
        return f"{time}-{crc32c(f'{token}/{number}'.encode()):08x}"


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of an item that is a tensor; 0 for another value."""
    data = item.tensor_data
    if data is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def plan_objects(items: Sequence[WriteItem], num_objects: int) -> list[list[WriteItem]]:
    """Spread items over at most `num_objects` objects of about the same size, none empty.

    Values that are not tensors come first in an object. Tensors keep the order of the plan, which
    is that of the state: items that are loaded together are stored together.
    """
    order = {id(item): number for number, item in enumerate(items)}
    heap = [(0, number) for number in range(num_objects)]
    objects: list[list[WriteItem]] = [[] for _ in range(num_objects)]
    for item in sorted(items, key=item_bytes, reverse=True):
        num_bytes, number = heapq.heappop(heap)
        objects[number].append(item)
        # One byte more, so that values without a size are spread, too.
        heapq.heappush(heap, (num_bytes + item_bytes(item) + 1, number))
    for each in objects:
        each.sort(key=lambda item: (item.type != WriteItemType.BYTE_IO, order[id(item)]))
    return [each for each in objects if each]


def _is_storable(item: WriteItem) -> bool:
    """Return whether safetensors can hold the tensor of an item."""
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        return False
    return _dtype_name(data.properties.dtype) in DTYPES and data.properties.layout == torch.strided


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_of(item: WriteItem) -> TensorSpec:
    """Return the spec of the whole tensor that an item is, or is a part of."""
    data = item.tensor_data
    assert data is not None
    return TensorSpec(item.index.fqn, _dtype_name(data.properties.dtype), tuple(data.size))


def plan_ranks(plans: Sequence[Sequence[WriteItem]], objects_per_rank: int) -> list[RankLayout]:
    """Return the placements of each rank's tensors.

    Args:
        plans: Items of all ranks, no part twice.
        objects_per_rank: Objects of each rank, at most; shared tensors take at most as many for
            each rank.
    """
    placements: list[dict[MetadataIndex, ItemPlacement]] = [{} for _ in plans]
    parts: dict[str, list[tuple[int, WriteItem]]] = {}
    num_objects = 0
    # By name: one rank may hold all rows of a sharded tensor, and the others empty parts.
    cut = {
        item.index.fqn
        for items in plans
        for item in items
        if _is_storable(item) and not _is_whole(item)
    }
    for rank, items in enumerate(plans):
        storable = [item for item in items if _is_storable(item)]
        whole = [item for item in storable if item.index.fqn not in cut]
        for each in plan_objects(whole, objects_per_rank):
            num_objects += 1
            placement = ItemPlacement(WriteKind.WHOLE, num_objects)
            placements[rank] |= {item.index: placement for item in each}
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
        layout = plan_layout(tensor_of(composed[name][0][1]) for name in names)
        block_size = plan_block_size(layout.size)
        for name in names:
            at = layout.offsets[name]
            for rank, item in composed[name]:
                placement = ItemPlacement(WriteKind.COMPOSED, num_objects, at, block_size)
                placements[rank][item.index] = placement
                at += item_bytes(item)
    if assembled:
        num_objects += 1
        placement = ItemPlacement(WriteKind.ASSEMBLED, num_objects)
        for rank, item in (each for name in assembled for each in parts[name]):
            placements[rank][item.index] = placement
    return [RankLayout(num_objects, each) for each in placements]


def _offsets(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)


def _is_whole(item: WriteItem) -> bool:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes == data.size


def _are_rows(items: Sequence[WriteItem]) -> bool:
    """Return whether items, in order, are all rows of one large tensor."""
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
    """Spread tensors over at most `num_groups` groups, balanced by size."""
    first = {name: parts[0][1] for name, parts in shared.items()}
    sizes = {name: tensor_of(item).num_bytes for name, item in first.items()}
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        least = loads.index(min(loads))
        groups[least].append(name)
        loads[least] += sizes[name]
    return [sorted(each, key=list(sizes).index) for each in groups if each]
