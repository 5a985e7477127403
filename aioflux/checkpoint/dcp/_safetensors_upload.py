"""Uploads of one rank in the safetensors layout, and the index that commits the checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from aioflux.checkpoint._format.commit import StoredItem, checksum_ranges, data_key, encode_index
from aioflux.checkpoint._format.safetensors import model_key, pack_metadata, plan_layout
from aioflux.checkpoint._save.items import has_plain_memory, tensor_memory
from aioflux.checkpoint._store.objects import write_object
from aioflux.checkpoint.dcp._object_plan import WriteKind, item_bytes, plan_objects, tensor_of
from aioflux.checkpoint.dcp._safetensors_parts import UploadedPart
from aioflux.checkpoint.dcp._upload import (
    PICKLE_PROTOCOL,
    UploadedItem,
    batches,
    resolve,
    upload_items,
)
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import WriteItem

    from aioflux.checkpoint._format.commit import Commit, RangeChecksum, StoredObject
    from aioflux.checkpoint.dcp._object_plan import RankLayout
    from aioflux.checkpoint.dcp._safetensors_parts import TensorLocation
    from aioflux.checkpoint.dcp._upload import RankUpload

_MAX_ROWS = 4
"""Maximum number of parallel uploads of rows. Each upload holds this rank's rows of one tensor in
memory."""


def plan_uploads(
    upload: RankUpload, items: Sequence[WriteItem], layout: RankLayout, objects_per_rank: int
) -> dict[str, Callable[[], Awaitable[list[WriteResult]]]]:
    """Return, for the key of each object of this rank, a function that writes the object.

    Items without a placement are written in the layout of DCP, to at most `objects_per_rank`
    objects.
    """
    save_id, rank = upload.save_id, upload.rank
    values = [item for item in items if item.index not in layout.placements]
    wholes: dict[int, list[WriteItem]] = {}
    parts: list[WriteItem] = []
    uploads: dict[str, Callable[[], Awaitable[list[WriteResult]]]] = {}
    slots = asyncio.Semaphore(_MAX_ROWS)
    for number, content in enumerate(plan_objects(values, objects_per_rank)):
        key = data_key(save_id, rank, number)
        uploads[key] = partial(upload_items, upload, key, content)
    for item in items:
        placement = layout.placements.get(item.index)
        if placement is None:
            continue
        if placement.kind is WriteKind.WHOLE:
            wholes.setdefault(placement.object_number, []).append(item)
        elif placement.kind is WriteKind.ASSEMBLED:
            parts.append(item)
        else:
            key = f"{save_id}/rows-{rank}-{len(uploads)}"
            uploads[key] = partial(_upload_rows, upload, key, item, layout, slots)
    for number, content in wholes.items():
        key = model_key(save_id, number, layout.num_objects)
        uploads[key] = partial(_upload_wholes, upload, key, content)
    if parts:
        key = f"{save_id}/parts-{rank}"
        uploads[key] = partial(_upload_parts, upload, key, parts, layout)
    return uploads


def _memory(upload: RankUpload, item: WriteItem) -> memoryview:
    """Return the memory of a tensor item."""
    tensor, data = resolve(upload.planner, item), item.tensor_data
    assert data is not None
    if (
        not isinstance(tensor, torch.Tensor)
        or not has_plain_memory(tensor)
        or tensor.dtype != data.properties.dtype
        or tensor.nbytes != item_bytes(item)
    ):
        raise CheckpointError(
            f"{item.index.fqn!r} was planned as {item_bytes(item)} bytes of "
            f"{data.properties.dtype}, but the planner returned something else; save it in the "
            "layout of DCP"
        )
    return tensor_memory(tensor)


async def _memories(
    upload: RankUpload, items: Iterable[WriteItem], header: bytes = b""
) -> AsyncIterator[bytes | memoryview]:
    if header:
        yield header
    for batch in batches(items):
        views = await asyncio.to_thread(
            lambda items: [_memory(upload, item) for item in items], batch
        )
        for view in views:
            yield view


async def _upload_wholes(
    upload: RankUpload, key: str, items: Sequence[WriteItem]
) -> list[WriteResult]:
    """Write an object of whole tensors of this rank."""
    by_name = {item.index.fqn: item for item in items}
    layout = plan_layout(map(tensor_of, items))
    ordered = [by_name[name] for name in layout.offsets]
    stored = await write_object(
        upload.store,
        key,
        _memories(upload, ordered, layout.header),
        rank=upload.rank,
        size_hint=layout.size,
    )
    ranges = [(layout.offsets[item.index.fqn], item_bytes(item)) for item in ordered]
    stored = msgspec.structs.replace(
        stored, items=tuple(StoredItem(start, size, start, size) for start, size in ranges)
    )
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=size,
            storage_data=UploadedItem(
                _StorageInfo(key, start, size), upload.save_id, None if number else stored
            ),
        )
        for number, (item, (start, size)) in enumerate(zip(ordered, ranges, strict=True))
    ]


async def _upload_parts(
    upload: RankUpload, key: str, items: Sequence[WriteItem], layout: RankLayout
) -> list[WriteResult]:
    """Write an object of parts of tensors, for the coordinator to read."""
    hint = sum(map(item_bytes, items))
    stored = await write_object(
        upload.store, key, _memories(upload, items), rank=upload.rank, size_hint=hint
    )
    results = list[WriteResult]()
    start = 0
    for item in items:
        results.append(_part_result(upload, item, layout, stored, start=start))
        start += item_bytes(item)
    return results


async def _upload_rows(
    upload: RankUpload, key: str, item: WriteItem, layout: RankLayout, slots: asyncio.Semaphore
) -> list[WriteResult]:
    """Write an object of this rank's rows of one tensor, for the service to compose."""
    placement = layout.placements[item.index]

    def read_rows() -> tuple[memoryview, tuple[RangeChecksum, ...]]:
        view = _memory(upload, item)
        offset, block_size = placement.offset, placement.block_size
        return view, tuple(checksum_ranges(view, offset=offset, block_size=block_size))

    async with slots:
        view, checksums = await asyncio.to_thread(read_rows)
        stored = await write_object(
            upload.store, key, [view], rank=upload.rank, size_hint=view.nbytes
        )
    return [_part_result(upload, item, layout, stored, checksums=checksums)]


def _part_result(
    upload: RankUpload,
    item: WriteItem,
    layout: RankLayout,
    stored: StoredObject,
    *,
    start: int = 0,
    checksums: tuple[RangeChecksum, ...] = (),
) -> WriteResult:
    assert item.tensor_data is not None
    part = UploadedPart(
        save_id=upload.save_id,
        num_objects=layout.num_objects,
        placement=layout.placements[item.index],
        tensor=tensor_of(item),
        offsets=tuple(item.tensor_data.chunk.offsets),
        sizes=tuple(item.tensor_data.chunk.sizes),
        stored=stored,
        start=start,
        checksums=checksums,
    )
    return WriteResult(index=item.index, size_in_bytes=item_bytes(item), storage_data=part)


def encode_safetensors(
    metadata: Metadata,
    results: Iterable[WriteResult],
    shared: Mapping[str, TensorLocation],
    commit: Commit,
) -> tuple[bytes, Commit]:
    """Return the commit object, which is a Hugging Face index, and the commit in it.

    The commit object stores a changed copy of DCP's metadata: each sharded tensor is one whole
    part. `metadata` itself keeps its parts, because planners cache and reuse it. `shared` has the
    sharded tensors that the coordinator joined, by name.
    """
    storage: dict[MetadataIndex, _StorageInfo] = {}
    objects: dict[str, StoredObject] = {}
    weights: dict[str, str] = {}
    tensors = dict(metadata.state_dict_metadata)
    for result in results:
        uploaded = result.storage_data
        if isinstance(uploaded, UploadedItem):
            storage[result.index] = uploaded.info
            if uploaded.info.relative_path.endswith(".safetensors"):
                weights[result.index.fqn] = uploaded.info.relative_path
            if uploaded.stored is not None:
                objects[uploaded.stored.key] = uploaded.stored
        elif uploaded.tensor.name not in weights:
            name, sizes = uploaded.tensor.name, torch.Size(uploaded.tensor.sizes)
            (stored, item), origin = shared[name], torch.Size([0] * len(sizes))
            storage[MetadataIndex(name, origin, 0)] = _StorageInfo(
                stored.key, item.offset, item.length
            )
            weights[name] = stored.key
            objects[stored.key] = stored
            planned: Any = tensors[name]
            whole = [ChunkStorageMetadata(offsets=origin, sizes=sizes)]
            tensors[name] = TensorStorageMetadata(planned.properties, planned.size, whole)
    metadata.storage_data = storage
    pickled = pickle.dumps(
        dataclasses.replace(metadata, state_dict_metadata=tensors), protocol=PICKLE_PROTOCOL
    )
    commit = msgspec.structs.replace(
        commit, objects=tuple(objects.values()), extra=pack_metadata(pickled)
    )
    total_size = sum(
        item.data_size
        for key, stored in objects.items()
        if key.endswith(".safetensors")
        for item in stored.items
    )
    index = {"metadata": {"total_size": total_size}, "weight_map": weights}
    return encode_index(index, commit), commit
