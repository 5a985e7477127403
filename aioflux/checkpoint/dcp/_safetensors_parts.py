"""Tensors that ranks share, each put together in one object by the coordinator.

    rank r   rows -> an object of their own          | coordinator: compose(header, rows, rows, ...)
             any other part -> parts of rank r       | coordinator: reads parts, writes the tensor

When rows are composed, no byte passes through the coordinator. Each rank reports the crc32c of its
rows by block of the composed object, so the checksums of these blocks are known without a read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from aioflux._concurrency.fan_out import gather
from aioflux.checkpoint._format.block_checksums import BlockDigest
from aioflux.checkpoint._format.commit import StoredItem, StoredObject, plan_block_size
from aioflux.checkpoint._format.safetensors import model_key, plan_layout
from aioflux.checkpoint._load.copies import narrow
from aioflux.checkpoint._save.items import tensor_memory
from aioflux.checkpoint._store.objects import meta_of, read_range, write_object
from aioflux.checkpoint.dcp._object_plan import WriteKind
from aioflux.errors import CheckpointError, ChecksumError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aioflux.checkpoint._format.block_checksums import RangeChecksum
    from aioflux.checkpoint._format.safetensors import ObjectLayout, TensorSpec
    from aioflux.checkpoint.dcp._object_plan import ItemPlacement
    from aioflux.store import Store

__all__ = ["TensorLocation", "UploadedPart", "finish_objects"]

_MAX_COMPOSED: Final = 32
"""Objects that GCS composes at once (cloud.google.com/storage/quotas)."""

_MAX_TENSORS: Final = 8
"""Tensors that are read at once, while those before them are written."""


class TensorLocation(NamedTuple):
    """The object and the item that hold a tensor."""

    stored: StoredObject
    item: StoredItem


@dataclass(frozen=True)
class UploadedPart:
    """A part of a tensor that a rank uploaded: the storage data of a `WriteResult`."""

    save_id: str
    num_objects: int
    placement: ItemPlacement
    tensor: TensorSpec
    """The whole tensor."""
    offsets: tuple[int, ...]
    """First element of the part in the tensor, in each dimension."""
    sizes: tuple[int, ...]
    """Elements of the part in each dimension."""
    stored: StoredObject
    """The object that holds the part."""
    start: int = 0
    """First byte of the part in that object."""
    checksums: tuple[RangeChecksum, ...] = ()
    """Checksums of the part by block, if the service composes it."""


async def finish_objects(
    store: Store, reader: Store, parts: Sequence[UploadedPart], *, rank: int
) -> dict[str, TensorLocation]:
    """Write the objects of tensors that ranks share, and return the tensors' locations by name.

    Parts are those of all ranks. They are read by `reader`, which `open_checkpoint` opened.

    Raises:
        CheckpointError: One could not be written.
    """
    by_number: dict[int, list[UploadedPart]] = {}
    for part in parts:
        by_number.setdefault(part.placement.object_number, []).append(part)
    locations = dict[str, TensorLocation]()
    for number, own in sorted(by_number.items()):
        key = model_key(own[0].save_id, number, own[0].num_objects)
        layout = plan_layout({part.tensor.name: part.tensor for part in own}.values())
        try:
            if own[0].placement.kind is WriteKind.COMPOSED:
                stored = await _compose(store, key, layout, own, rank)
            else:
                stored = await _assemble(store, reader, key, layout, own, rank)
        except Exception as exc:
            raise CheckpointError(
                f"rank {rank} could not write {store.uri}{key} from the parts that the ranks "
                f"uploaded: {type(exc).__name__}: {exc}"
            ) from exc
        sizes = {part.tensor.name: part.tensor.num_bytes for part in own}
        items = {
            name: StoredItem(at, sizes[name], at, sizes[name])
            for name, at in layout.offsets.items()
        }
        stored = msgspec.structs.replace(stored, items=tuple(items.values()))
        locations |= {name: TensorLocation(stored, item) for name, item in items.items()}
    return locations


async def _compose(
    store: Store, key: str, layout: ObjectLayout, parts: Sequence[UploadedPart], rank: int
) -> StoredObject:
    """Compose an object from its header and the rows of all ranks."""
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
                f"{part.tensor.name!r} has a part at byte {placement.offset}, expected at "
                f"{digest.size}; save again with a planner that does not cache plans"
            )
        for each in part.checksums:
            digest.add(each)
    whole, block_crcs = digest.finish()
    sources = [meta_of(store, each) for each in (header, *(part.stored for part in rows))]
    level = 0
    while len(sources) > _MAX_COMPOSED:
        level += 1
        groups = [sources[i : i + _MAX_COMPOSED] for i in range(0, len(sources), _MAX_COMPOSED)]
        sources = [
            await store.compose(f"{prefix}.{level}.{number}", group)
            for number, group in enumerate(groups)
        ]
    meta = await store.compose(key, sources)
    if meta.size != layout.size or meta.crc32c not in {None, whole}:
        raise ChecksumError(
            f"{meta.uri} was composed of {meta.size} bytes with crc32c {meta.crc32c}, and "
            f"{layout.size} bytes with crc32c {whole} were uploaded; save again",
            uri=meta.uri,
        )
    return StoredObject(
        key=key,
        size=meta.size,
        crc32c=whole,
        generation=meta.generation,
        rank=rank,
        block_size=digest.block_size,
        block_crcs=block_crcs,
    )


async def _assemble(
    store: Store,
    reader: Store,
    key: str,
    layout: ObjectLayout,
    parts: Sequence[UploadedPart],
    rank: int,
) -> StoredObject:
    """Read the parts of all tensors of an object, and write it."""
    by_name: dict[str, list[UploadedPart]] = {name: [] for name in layout.offsets}
    for part in parts:
        by_name[part.tensor.name].append(part)

    async def pieces() -> AsyncIterator[bytes | memoryview]:
        yield layout.header
        own = list(by_name.values())
        for at in range(0, len(own), _MAX_TENSORS):
            tensors = await gather(
                _read_tensor(reader, each) for each in own[at : at + _MAX_TENSORS]
            )
            for tensor in tensors:
                yield tensor_memory(tensor)

    return await write_object(store, key, pieces(), rank=rank, size_hint=layout.size)


async def _read_tensor(reader: Store, parts: Sequence[UploadedPart]) -> torch.Tensor:
    """Read all parts of a tensor."""
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
        await read_range(reader, part.stored, start=part.start, into=memoryview(data))
        target = narrow(whole, part.offsets, part.sizes)
        target.copy_(torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(part.sizes))
    if num_read != whole.numel():
        raise CheckpointError(
            f"the ranks uploaded {num_read:,} of the {whole.numel():,} elements of {spec.name!r}; "
            "every part of a tensor must be on some rank"
        )
    return whole
