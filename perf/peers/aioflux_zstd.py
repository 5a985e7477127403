"""aioflux: compressed checkpoints, in memory and through its storage of DCP; and that without."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

import aioflux
from aioflux.checkpoint._format.frames import plan_slices
from aioflux.checkpoint._save.items import encode_tensor
from aioflux.checkpoint.compression import ZStandard
from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from perf.weights import num_bytes_of, weights_of
from perf.work import Told

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StoredItem
    from perf.work import Work


def prepare(work: Work) -> None:
    """Make the state, and what a load begins with."""
    weights_of(work.dtype, work.size_bytes)
    if work.operation == "decompress":
        _compressed(work.dtype, work.size_bytes)
    if work.operation.startswith("load"):
        _saved(work)


async def compress(work: Work) -> Told:
    """Compress a state in memory."""
    stored = 0
    with ZStandard().open_codec() as codec:
        for tensor in weights_of(work.dtype, work.size_bytes).values():
            memory = encode_tensor(tensor).segments[1]
            item = codec.encode_item(b"", memory, b"", element_size=tensor.itemsize)
            stored += sum([len(segment) async for _, segment in codec.encode_items([item])])
    return Told(work.size_bytes, stored_bytes=stored)


async def decompress(work: Work) -> Told:
    """Decompress a state into memory that is there."""
    stored = 0
    with ZStandard().open_codec() as codec:
        for packed, table, tensor in _compressed(work.dtype, work.size_bytes):
            slices = plan_slices(
                0,
                table.data_size,
                size=table.data_size,
                frame_size=table.frame_size,
                frame_ends=table.frame_ends,
            )
            frames = memoryview(packed)[table.data_start :]
            await codec.decode(frames, slices, _memory(tensor), plane_size=table.plane_size)
            stored += len(packed)
    return Told(work.size_bytes, stored_bytes=stored)


async def save_compressed(work: Work) -> Told:
    """Save a state, compressed."""
    return await asyncio.to_thread(_save, work)


async def save_plain(work: Work) -> Told:
    """Save a state as it is."""
    return await asyncio.to_thread(_save, work)


async def load_compressed(work: Work) -> Told:
    """Load what `save_compressed` saved into tensors that are there."""
    return await asyncio.to_thread(_load, work)


async def load_plain(work: Work) -> Told:
    """Load what `save_plain` saved into tensors that are there."""
    return await asyncio.to_thread(_load, work)


@lru_cache(maxsize=1)
def _compressed(dtype: str, size_bytes: int) -> list[tuple[bytes, StoredItem, torch.Tensor]]:
    """Return each tensor's item, where its frames are, and a tensor to decompress it into."""
    return asyncio.run(_compress(dtype, size_bytes))


async def _compress(dtype: str, size_bytes: int) -> list[tuple[bytes, StoredItem, torch.Tensor]]:
    found = []
    with ZStandard().open_codec() as codec:
        for tensor in weights_of(dtype, size_bytes).values():
            memory = encode_tensor(tensor).segments[1]
            item = codec.encode_item(b"", memory, b"", element_size=tensor.itemsize)
            segments = [segment async for _, segment in codec.encode_items([item])]
            found.append((b"".join(segments), item.stored(0), torch.zeros_like(tensor)))
    return found


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _uri(work: Work) -> str:
    return f"gs://{work.bucket}/{work.operation.partition('_')[2]}-{work.dtype}-{work.size_bytes}"


def _transfer(work: Work) -> aioflux.TransferOptions:
    return aioflux.TransferOptions(max_in_flight=work.in_flight)


def _save(work: Work) -> Told:
    state = weights_of(work.dtype, work.size_bytes)
    is_compressed = work.operation.endswith("compressed")
    writer = StorageWriter(
        _uri(work),
        compression=ZStandard() if is_compressed else None,
        endpoint_url=work.url,
        transfer=_transfer(work),
    )
    metadata = dcp.save(state, storage_writer=writer, no_dist=True)
    stored = sum(info.length for info in metadata.storage_data.values())
    return Told(num_bytes_of(state), stored_bytes=stored)


@lru_cache(maxsize=1)
def _saved(work: Work) -> tuple[dict[str, torch.Tensor], int]:
    """Save what a load reads; return tensors to load it into, and the bytes that it takes."""
    stored = _save(work).stored_bytes
    into = weights_of(work.dtype, work.size_bytes)
    return {name: torch.zeros_like(tensor) for name, tensor in into.items()}, stored


def _load(work: Work) -> Told:
    into, stored = _saved(work)
    reader = StorageReader(_uri(work), endpoint_url=work.url, transfer=_transfer(work))
    dcp.load(into, storage_reader=reader, no_dist=True)
    return Told(num_bytes_of(into), stored_bytes=stored)
