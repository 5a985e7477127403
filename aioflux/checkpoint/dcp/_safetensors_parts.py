"""Sharded tensors in the safetensors layout: the coordinator joins the parts of all ranks.

    rank                                     coordinator
    rows -> one object for each tensor       composes header, rows, rows, ... to one object
    other parts -> one object for the rank   reads the parts, and writes whole tensors

For composed objects, the coordinator writes only the header, and reads nothing. Each rank reports
the crc32c of its rows for each block of the composed object, so block checksums are known without a
read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from aioflux._concurrency.fan_out import gather
from aioflux.checkpoint._format.commit import BlockDigest, StoredItem, StoredObject, plan_block_size
from aioflux.checkpoint._format.safetensors import model_key, plan_layout
from aioflux.checkpoint._load.targets import narrow
from aioflux.checkpoint._save.items import tensor_memory
from aioflux.checkpoint._store.objects import meta_of, read_range, stored_object, write_object
from aioflux.checkpoint.dcp._object_plan import WriteKind
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import RangeChecksum
    from aioflux.checkpoint._format.safetensors import ObjectLayout, TensorSpec
    from aioflux.checkpoint.dcp._object_plan import ItemPlacement
    from aioflux.store import Store

_MAX_COMPOSED: Final = 32
"""Maximum number of objects that one compose request of GCS accepts
(cloud.google.com/storage/quotas)."""

_MAX_TENSORS: Final = 8
"""Maximum number of tensors that are read in parallel, before they are written."""


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
