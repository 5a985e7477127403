"""Tensors that ranks share, put together by the coordinator: each is whole in one object.

    rank r   rows -> an object of their own          | coordinator: compose(header, rows, rows, ...)
             any other part -> parts of rank r       | coordinator: reads, puts in place, writes

The service composes without a byte through the coordinator. What the ranks tell of their rows is
the crc32c of each run within one block of the object to be: so its blocks are known all the same.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux._values.meta import ObjectMeta
from aioflux.checkpoint._format.commit import StoredItem, StoredObject, plan_block_size
from aioflux.checkpoint._save.items import tensor_memory
from aioflux.checkpoint._save.safetensors import Kind, lay_out, model_key
from aioflux.checkpoint._store.objects import read_range, write_object
from aioflux.errors import CheckpointError, ChecksumError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from aioflux.checkpoint._save.safetensors import Layout, Role, Tensor
    from aioflux.store import Store

__all__ = ["Part", "Place", "Run", "finish_objects", "runs_of"]

_MAX_COMPOSED: Final = 32
"""Objects that GCS composes at once (cloud.google.com/storage/quotas)."""

_AT_ONCE: Final = 8
"""Tensors that are read at once, while those before them are written."""


class Place(NamedTuple):
    """Where a tensor lies."""

    stored: StoredObject
    item: StoredItem


class Run(NamedTuple):
    """Bytes one behind the other in one block of an object."""

    crc32c: int
    size: int


@dataclass(frozen=True)
class Part:
    """A part of a tensor that a rank uploaded: the storage data of a `WriteResult`."""

    save_id: str
    num_objects: int
    role: Role
    tensor: Tensor
    """What it is a part of."""
    offsets: tuple[int, ...]
    """Its first element in the tensor, in each dimension."""
    sizes: tuple[int, ...]
    """Its elements in each dimension."""
    stored: StoredObject
    """The object that it is in."""
    start: int = 0
    """First byte of it there."""
    runs: tuple[Run, ...] = ()
    """Checksums, where the service composes it."""


def runs_of(view: memoryview, *, offset: int, block_size: int) -> Iterator[Run]:
    """Yield the checksums of bytes that begin at `offset` of an object, block by block."""
    at = 0
    while at < view.nbytes:
        room = block_size - (offset + at) % block_size
        piece = view[at : at + room]
        yield Run(crc32c(piece), piece.nbytes)
        at += piece.nbytes


def blocks_of(runs: Iterable[Run], block_size: int) -> list[Run]:
    """Return the checksum of each block of an object, from those of its runs in order."""
    blocks, current = list[Run](), Run(0, 0)
    for run in runs:
        crc = combine_crc32c(current.crc32c, run.crc32c, run.size)
        current = Run(crc, current.size + run.size)
        if current.size == block_size:
            blocks.append(current)
            current = Run(0, 0)
    return [*blocks, current] if current.size else blocks


async def finish_objects(
    store: Store, reader: Store, parts: Sequence[Part], *, rank: int
) -> dict[str, Place]:
    """Write the objects of tensors that ranks share, and return where each tensor lies, by name.

    Args:
        store: Where.
        reader: The same, for reads that are verified by blocks.
        parts: What the ranks uploaded.
        rank: The coordinator.

    Raises:
        CheckpointError: One could not be written.
    """
    by_number: dict[int, list[Part]] = {}
    for part in parts:
        by_number.setdefault(part.role.number, []).append(part)
    finished = dict[str, Place]()
    for number, own in sorted(by_number.items()):
        key = model_key(own[0].save_id, number, own[0].num_objects)
        layout = lay_out({part.tensor.name: part.tensor for part in own}.values())
        try:
            if own[0].role.kind is Kind.COMPOSED:
                stored = await _compose(store, key, layout, own, rank)
            else:
                stored = await _assemble(store, reader, key, layout, own, rank)
        except Exception as exc:
            error = exc.exceptions[0] if isinstance(exc, ExceptionGroup) else exc
            raise CheckpointError(
                f"rank {rank} could not put {store.uri}{key} together from what the ranks "
                f"uploaded: {type(error).__name__}: {error}"
            ) from error
        sizes = {part.tensor.name: part.tensor.num_bytes for part in own}
        items = {
            name: StoredItem(at, sizes[name], at, sizes[name])
            for name, at in layout.offsets.items()
        }
        stored = msgspec.structs.replace(stored, items=tuple(items.values()))
        finished |= {name: Place(stored, item) for name, item in items.items()}
    return finished


async def _compose(
    store: Store, key: str, layout: Layout, parts: Sequence[Part], rank: int
) -> StoredObject:
    block_size = plan_block_size(layout.size)
    head = await write_object(store, f"{parts[0].save_id}/{key}.header", [layout.header], rank=rank)
    ordered = sorted(
        (part for part in parts if part.stored.size), key=lambda part: part.role.offset
    )
    runs = list(runs_of(memoryview(layout.header), offset=0, block_size=block_size))
    at = head.size
    for part in ordered:
        if part.role.offset != at or part.role.block_size != block_size:
            raise CheckpointError(
                f"{part.tensor.name!r} has a part at byte {part.role.offset}, and {at} was next; "
                "save again with a planner that caches no plans"
            )
        runs += part.runs
        at += part.stored.size
    sources = [_meta(store, each) for each in (head, *(part.stored for part in ordered))]
    level = 0
    while len(sources) > _MAX_COMPOSED:
        level += 1
        groups = [sources[i : i + _MAX_COMPOSED] for i in range(0, len(sources), _MAX_COMPOSED)]
        sources = [
            await store.compose(f"{parts[0].save_id}/{key}.{level}.{number}", group)
            for number, group in enumerate(groups)
        ]
    meta = await store.compose(key, sources)
    blocks = blocks_of(runs, block_size)
    whole = 0
    for block in blocks:
        whole = combine_crc32c(whole, block.crc32c, block.size)
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
        block_size=block_size,
        block_crcs=struct.pack(f">{len(blocks)}I", *(block.crc32c for block in blocks)),
    )


def _meta(store: Store, stored: StoredObject) -> ObjectMeta:
    return ObjectMeta(
        key=stored.key,
        uri=f"{store.uri}{stored.key}",
        size=stored.size,
        generation=stored.generation,
    )


async def _assemble(
    store: Store, reader: Store, key: str, layout: Layout, parts: Sequence[Part], rank: int
) -> StoredObject:
    by_name: dict[str, list[Part]] = {name: [] for name in layout.offsets}
    for part in parts:
        by_name[part.tensor.name].append(part)

    async def pieces() -> AsyncIterator[bytes | memoryview]:
        yield layout.header
        own = list(by_name.values())
        for at in range(0, len(own), _AT_ONCE):
            for tensor in await _read_tensors(reader, own[at : at + _AT_ONCE]):
                yield tensor_memory(tensor)

    return await write_object(store, key, pieces(), rank=rank, size_hint=layout.size)


async def _read_tensors(reader: Store, tensors: Sequence[Sequence[Part]]) -> list[torch.Tensor]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_read_tensor(reader, parts)) for parts in tensors]
    return [task.result() for task in tasks]


async def _read_tensor(reader: Store, parts: Sequence[Part]) -> torch.Tensor:
    """Read the parts of a tensor, each into its place."""
    first = parts[0].tensor
    whole = torch.empty(first.sizes, dtype=first.dtype)
    covered = 0
    for part in parts:
        size = torch.Size(part.sizes).numel()
        covered += size
        if not size:
            continue
        data = bytearray(size * first.dtype.itemsize)
        await read_range(reader, part.stored, start=part.start, into=memoryview(data))
        place = whole
        for dim, (at, length) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            place = place.narrow(dim, at, length)
        place.copy_(torch.frombuffer(data, dtype=torch.uint8).view(first.dtype).view(part.sizes))
    if covered != whole.numel():
        raise CheckpointError(
            f"the ranks uploaded {covered:,} of the {whole.numel():,} elements of {first.name!r}; "
            "every part of a tensor must be on some rank"
        )
    return whole
