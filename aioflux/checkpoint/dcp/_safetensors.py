"""The safetensors layout: uploads of one rank, and objects that the coordinator joins.

    rank                                     coordinator
    whole tensors -> objects
    rows -> one object for each tensor       composes header, rows, rows, ... to one object
    other parts -> one object for the rank   reads the parts, and writes whole tensors
                                             encodes the index that commits the checkpoint

For composed objects, the coordinator writes only the header, and reads nothing. Each rank reports
the crc32c of its rows for each block of the composed object, so block checksums are known without a
read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from aioflux._concurrency.fan_out import gather
from aioflux.checkpoint._format.commit import (
    BlockDigest,
    StoredItem,
    StoredObject,
    checksum_ranges,
    data_key,
    encode_index,
    plan_block_size,
)
from aioflux.checkpoint._format.safetensors import model_key, pack_metadata, plan_layout
from aioflux.checkpoint._load.targets import narrow
from aioflux.checkpoint._save.items import has_plain_memory, tensor_memory
from aioflux.checkpoint._store.objects import meta_of, read_range, stored_object, write_object
from aioflux.checkpoint.dcp._object_plan import WriteKind, item_bytes, plan_objects, tensor_of
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

    from aioflux.checkpoint._format.commit import Commit, RangeChecksum
    from aioflux.checkpoint._format.safetensors import ObjectLayout, TensorSpec
    from aioflux.checkpoint.dcp._object_plan import ItemPlacement, RankLayout
    from aioflux.checkpoint.dcp._upload import RankUpload
    from aioflux.store import Store

_MAX_COMPOSED: Final = 32
"""Maximum number of objects that one compose request of GCS accepts
(cloud.google.com/storage/quotas)."""

_MAX_TENSORS: Final = 8
"""Maximum number of tensors that are read in parallel, before they are written."""

_MAX_ROWS = 4
"""Maximum number of parallel uploads of rows. Each upload holds this rank's rows of one tensor in
memory."""


class TensorLocation(NamedTuple):
    """The object that contains a tensor, and the item of the tensor in it."""

    stored: StoredObject
    item: StoredItem


@dataclass(frozen=True)
class UploadedPart:
    """A part of a tensor that a rank uploaded. It is the `storage_data` of a `WriteResult`."""

    save_id: str
    num_objects: int
    placement: ItemPlacement
    tensor: TensorSpec
    """The whole tensor."""
    offsets: tuple[int, ...]
    """Position of the part's first element in the tensor."""
    sizes: tuple[int, ...]
    stored: StoredObject
    start: int = 0
    """First byte of the part in the object."""
    checksums: tuple[RangeChecksum, ...] = ()
    """Checksums of the part for each block of the composed object; empty if not composed."""


async def finish_objects(
    store: Store, parts: Sequence[UploadedPart], *, rank: int
) -> dict[str, TensorLocation]:
    """Write the objects of sharded tensors, and return the locations of the tensors by name.

    `parts` has the parts of all ranks.

    Raises:
        CheckpointError: An object could not be written.
    """
    by_number: dict[int, list[UploadedPart]] = {}
    for part in parts:
        by_number.setdefault(part.placement.object_number, []).append(part)
    locations = dict[str, TensorLocation]()
    for number, of_object in sorted(by_number.items()):
        key = model_key(of_object[0].save_id, number, of_object[0].num_objects)
        layout = plan_layout({part.tensor.name: part.tensor for part in of_object}.values())
        try:
            if of_object[0].placement.kind is WriteKind.COMPOSED:
                stored = await _compose(store, key, layout, of_object, rank)
            else:
                stored = await _assemble(store, key, layout, of_object, rank)
        except Exception as exc:
            raise CheckpointError(
                f"rank {rank} could not write {store.uri}{key} from the parts that the ranks "
                f"uploaded: {type(exc).__name__}: {exc}"
            ) from exc
        sizes = {part.tensor.name: part.tensor.num_bytes for part in of_object}
        items = {
            name: StoredItem(offset, sizes[name], offset, sizes[name])
            for name, offset in layout.offsets.items()
        }
        stored = msgspec.structs.replace(stored, items=tuple(items.values()))
        locations |= {name: TensorLocation(stored, item) for name, item in items.items()}
    return locations


async def _compose(
    store: Store, key: str, layout: ObjectLayout, parts: Sequence[UploadedPart], rank: int
) -> StoredObject:
    """Compose an object from a header and the rows of all ranks."""
    prefix = f"{parts[0].save_id}/{key}"
    header = await write_object(store, f"{prefix}.header", [layout.header], rank=rank)
    rows = sorted(
        (part for part in parts if part.stored.size), key=lambda part: part.placement.offset
    )
    digest = BlockDigest(plan_block_size(layout.size))
    digest.update(memoryview(layout.header))
    for part in rows:
        placement = part.placement
        if placement.offset != digest.size or placement.block_size != digest.block_size:
            raise CheckpointError(
                f"{part.tensor.name!r} has a part at byte {placement.offset} in blocks of "
                f"{placement.block_size} bytes, expected at byte {digest.size} in blocks of "
                f"{digest.block_size} bytes; save again with a planner that does not cache plans"
            )
        for checksum in part.checksums:
            digest.add(checksum)
    sources = [meta_of(store, header), *(meta_of(store, part.stored) for part in rows)]
    level = 0
    while len(sources) > _MAX_COMPOSED:
        level += 1
        groups = [sources[i : i + _MAX_COMPOSED] for i in range(0, len(sources), _MAX_COMPOSED)]
        sources = [
            await store.compose(f"{prefix}.{level}.{number}", group)
            for number, group in enumerate(groups)
        ]
    meta = await store.compose(key, sources)
    return stored_object(meta, digest, key=key, size=layout.size, rank=rank)


async def _assemble(
    store: Store,
    key: str,
    layout: ObjectLayout,
    parts: Sequence[UploadedPart],
    rank: int,
) -> StoredObject:
    """Read the parts of all tensors of an object, and write the object."""
    by_name: dict[str, list[UploadedPart]] = {name: [] for name in layout.offsets}
    for part in parts:
        by_name[part.tensor.name].append(part)

    async def pieces() -> AsyncIterator[bytes | memoryview]:
        yield layout.header
        of_tensors = list(by_name.values())
        for start in range(0, len(of_tensors), _MAX_TENSORS):
            batch = of_tensors[start : start + _MAX_TENSORS]
            tensors = await gather(_read_tensor(store, of_tensor) for of_tensor in batch)
            for tensor in tensors:
                yield tensor_memory(tensor)

    return await write_object(store, key, pieces(), rank=rank, size_hint=layout.size)


async def _read_tensor(store: Store, parts: Sequence[UploadedPart]) -> torch.Tensor:
    """Read the parts of a tensor, and return the whole tensor."""
    spec = parts[0].tensor
    dtype: torch.dtype = getattr(torch, spec.dtype)
    whole = torch.empty(spec.sizes, dtype=dtype)
    num_read = 0
    for part in parts:
        size = torch.Size(part.sizes).numel()
        num_read += size
        if not size:
            continue
        data = bytearray(size * spec.item_size)
        await read_range(store, part.stored, start=part.start, into=memoryview(data))
        target = narrow(whole, part.offsets, part.sizes)
        target.copy_(torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(part.sizes))
    if num_read != whole.numel():
        raise CheckpointError(
            f"the ranks uploaded {num_read:,} of the {whole.numel():,} elements of {spec.name!r}; "
            "every element of a tensor must be on exactly one rank"
        )
    return whole


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
