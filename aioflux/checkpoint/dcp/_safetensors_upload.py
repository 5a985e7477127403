"""What one rank uploads in the layout of safetensors, and the index that makes it a checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from aioflux.checkpoint._format.commit import StoredItem, data_key
from aioflux.checkpoint._save.items import has_plain_memory, tensor_memory
from aioflux.checkpoint._save.object_plan import item_bytes, plan_objects
from aioflux.checkpoint._save.safetensors import Kind, RankLayout, lay_out, model_key, tensor_of
from aioflux.checkpoint._store.objects import write_object
from aioflux.checkpoint.dcp._safetensors_parts import Part, Place, Run, runs_of
from aioflux.checkpoint.dcp._upload import Written, batches, resolve, upload_items
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import WriteItem

    from aioflux.checkpoint._format.commit import StoredObject
    from aioflux.checkpoint._save.safetensors import Role
    from aioflux.checkpoint.dcp._upload import Upload

__all__ = ["Contents", "contents_of", "index_of", "plan_uploads"]

_MAX_PARTS_AT_ONCE = 4
"""Parts that are resolved and uploaded at once, each to an object of its own."""


def plan_uploads(
    upload: Upload, items: Sequence[WriteItem], layout: RankLayout, objects_per_rank: int
) -> dict[str, Callable[[], Awaitable[list[WriteResult]]]]:
    """Return what writes each object of a rank, by key.

    Args:
        upload: The save.
        items: The plan of the rank.
        layout: Where its tensors go.
        objects_per_rank: Objects for what is stored as DCP stores it.
    """
    save_id, rank = upload.save_id, upload.rank
    values = [item for item in items if item.index not in layout.roles]
    wholes: dict[int, list[WriteItem]] = {}
    parts: list[WriteItem] = []
    uploads: dict[str, Callable[[], Awaitable[list[WriteResult]]]] = {}
    turns = asyncio.Semaphore(_MAX_PARTS_AT_ONCE)
    for at, some in enumerate(plan_objects(values, objects_per_rank)):
        key = data_key(save_id, rank, at)
        uploads[key] = partial(upload_items, upload, key, some)
    for item in items:
        role = layout.roles.get(item.index)
        if role is None:
            continue
        if role.kind is Kind.WHOLE:
            wholes.setdefault(role.number, []).append(item)
        elif role.kind is Kind.ASSEMBLED:
            parts.append(item)
        else:
            key = f"{save_id}/rows-{rank}-{len(uploads)}"
            uploads[key] = partial(_upload_rows, upload, key, item, layout, turns)
    for number, some in wholes.items():
        key = model_key(save_id, number, layout.num_objects)
        uploads[key] = partial(_upload_wholes, upload, key, some)
    if parts:
        key = f"{save_id}/parts-{rank}"
        uploads[key] = partial(_upload_parts, upload, key, parts, layout)
    return uploads


def _memory(upload: Upload, item: WriteItem) -> memoryview:
    """Return the bytes of an item that is a tensor, or a part of one."""
    tensor, planned = resolve(upload.planner, item), tensor_of(item)
    if (
        not isinstance(tensor, torch.Tensor)
        or not has_plain_memory(tensor)
        or tensor.dtype != planned.dtype
        or tensor.nbytes != item_bytes(item)
    ):
        raise CheckpointError(
            f"{planned.name!r} was planned as {item_bytes(item)} bytes of {planned.dtype}, and is "
            "not such a tensor; the layout of DCP takes it"
        )
    return tensor_memory(tensor)


async def _memories(
    upload: Upload, items: Iterable[WriteItem], header: bytes = b""
) -> AsyncIterator[bytes | memoryview]:
    if header:
        yield header
    for batch in batches(items):
        for view in await asyncio.to_thread(_some_memories, upload, batch):
            yield view


def _some_memories(upload: Upload, items: Iterable[WriteItem]) -> list[memoryview]:
    return [_memory(upload, item) for item in items]


async def _upload_wholes(upload: Upload, key: str, items: Sequence[WriteItem]) -> list[WriteResult]:
    """Write an object of tensors that are whole on this rank."""
    by_name = {item.index.fqn: item for item in items}
    layout = lay_out(map(tensor_of, items))
    ordered = [by_name[name] for name in layout.offsets]
    stored = await write_object(
        upload.store,
        key,
        _memories(upload, ordered, layout.header),
        rank=upload.rank,
        size_hint=layout.size,
    )
    lie = [(layout.offsets[item.index.fqn], item_bytes(item)) for item in ordered]
    stored = msgspec.structs.replace(
        stored, items=tuple(StoredItem(at, size, at, size) for at, size in lie)
    )
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=size,
            storage_data=Written(
                _StorageInfo(key, at, size), upload.save_id, None if number else stored
            ),
        )
        for number, (item, (at, size)) in enumerate(zip(ordered, lie, strict=True))
    ]


async def _upload_parts(
    upload: Upload, key: str, items: Sequence[WriteItem], layout: RankLayout
) -> list[WriteResult]:
    """Write an object of parts that the coordinator will read."""
    hint = sum(map(item_bytes, items))
    stored = await write_object(
        upload.store, key, _memories(upload, items), rank=upload.rank, size_hint=hint
    )
    results = list[WriteResult]()
    at = 0
    for item in items:
        role = layout.roles[item.index]
        results.append(_part(upload, item, layout, role, stored, start=at))
        at += item_bytes(item)
    return results


async def _upload_rows(
    upload: Upload, key: str, item: WriteItem, layout: RankLayout, turns: asyncio.Semaphore
) -> list[WriteResult]:
    """Write an object of the rows of one tensor that this rank has."""
    role = layout.roles[item.index]
    async with turns:
        view, runs = await asyncio.to_thread(_rows, upload, item, role)
        stored = await write_object(
            upload.store, key, [view], rank=upload.rank, size_hint=view.nbytes
        )
    return [_part(upload, item, layout, role, stored, runs=runs)]


def _rows(upload: Upload, item: WriteItem, role: Role) -> tuple[memoryview, tuple[Run, ...]]:
    view = _memory(upload, item)
    return view, tuple(runs_of(view, offset=role.offset, block_size=role.block_size))


def _part(
    upload: Upload,
    item: WriteItem,
    layout: RankLayout,
    role: Role,
    stored: StoredObject,
    *,
    start: int = 0,
    runs: tuple[Run, ...] = (),
) -> WriteResult:
    assert item.tensor_data is not None
    part = Part(
        save_id=upload.save_id,
        num_objects=layout.num_objects,
        role=role,
        tensor=tensor_of(item),
        offsets=tuple(item.tensor_data.chunk.offsets),
        sizes=tuple(item.tensor_data.chunk.sizes),
        stored=stored,
        start=start,
        runs=runs,
    )
    return WriteResult(index=item.index, size_in_bytes=item_bytes(item), storage_data=part)


class Contents(NamedTuple):
    """What a save has written, all ranks together."""

    metadata: Metadata
    """DCP's metadata; every tensor of safetensors is one part there, wherever it came from."""
    objects: tuple[StoredObject, ...]
    weight_map: dict[str, str]
    """Key of the object of each tensor of safetensors."""


def contents_of(
    metadata: Metadata, results: Iterable[WriteResult], shared: Mapping[str, Place]
) -> Contents:
    """Return what a save has written.

    Args:
        metadata: What DCP planned; it is left as it is, since planners cache it.
        results: What the ranks wrote.
        shared: Where the tensors lie that the coordinator put together.
    """
    storage: dict[MetadataIndex, _StorageInfo] = {}
    objects: dict[str, StoredObject] = {}
    weights: dict[str, str] = {}
    tensors = dict(metadata.state_dict_metadata)
    for result in results:
        told = result.storage_data
        if isinstance(told, Written):
            storage[result.index] = told.info
            if told.info.relative_path.endswith(".safetensors"):
                weights[result.index.fqn] = told.info.relative_path
            if told.stored is not None:
                objects[told.stored.key] = told.stored
        elif told.tensor.name not in weights:
            name, sizes = told.tensor.name, torch.Size(told.tensor.sizes)
            (stored, item), origin = shared[name], torch.Size([0] * len(sizes))
            storage[MetadataIndex(name, origin, 0)] = _StorageInfo(
                stored.key, item.offset, item.length
            )
            weights[name] = stored.key
            objects[stored.key] = stored
            planned: Any = tensors[name]
            whole = [ChunkStorageMetadata(offsets=origin, sizes=sizes)]
            tensors[name] = TensorStorageMetadata(planned.properties, planned.size, whole)
    described = dataclasses.replace(metadata, state_dict_metadata=tensors, storage_data=storage)
    return Contents(described, tuple(objects.values()), weights)


def index_of(contents: Contents) -> dict[str, Any]:
    """Return the index that Hugging Face's readers look for."""
    total_size = sum(
        item.data_size
        for each in contents.objects
        if each.key.endswith(".safetensors")
        for item in each.items
    )
    return {"metadata": {"total_size": total_size}, "weight_map": contents.weight_map}
