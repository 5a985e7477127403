"""aioflux: compression in memory, and DCP saves and loads with and without compression."""

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
from perf.work import OperationResult

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StoredItem
    from perf.work import Work


def prepare(work: Work) -> None:
    """Create the state; for decompression its compressed form, for a load a checkpoint."""
    weights_of(work.dtype, work.size_bytes)
    if work.operation == "decompress":
        _compressed(work.dtype, work.size_bytes)
    if work.operation.startswith("load"):
        _saved(work)


async def compress(work: Work) -> OperationResult:
    """Compress a state in memory."""
    stored = 0
    with ZStandard().open_codec() as codec:
        for tensor in weights_of(work.dtype, work.size_bytes).values():
            memory = encode_tensor(tensor).segments[1]
            item = codec.encode_item(b"", memory, b"", element_size=tensor.itemsize)
            stored += sum([len(segment) async for _, segment in codec.encode_items([item])])
    return OperationResult(work.size_bytes, stored_bytes=stored)


async def decompress(work: Work) -> OperationResult:
    """Decompress a state into existing tensors."""
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
    return OperationResult(work.size_bytes, stored_bytes=stored)


async def save_compressed(work: Work) -> OperationResult:
    """Save a state with compression."""
    return await asyncio.to_thread(_save, work)


async def save_plain(work: Work) -> OperationResult:
    """Save a state without compression."""
    return await asyncio.to_thread(_save, work)


async def load_compressed(work: Work) -> OperationResult:
    """Load the checkpoint of `save_compressed` into existing tensors."""
    return await asyncio.to_thread(_load, work)


async def load_plain(work: Work) -> OperationResult:
    """Load the checkpoint of `save_plain` into existing tensors."""
    return await asyncio.to_thread(_load, work)


@lru_cache(maxsize=1)
def _compressed(dtype: str, size_bytes: int) -> list[tuple[bytes, StoredItem, torch.Tensor]]:
    """Return the encoded item of each tensor, the positions of its frames, and a target tensor."""
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


def _save(work: Work) -> OperationResult:
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
    return OperationResult(num_bytes_of(state), stored_bytes=stored)


@lru_cache(maxsize=1)
def _saved(work: Work) -> tuple[dict[str, torch.Tensor], int]:
    """Save a checkpoint; return tensors to load into, and the stored size in bytes."""
    stored = _save(work).stored_bytes
    into = weights_of(work.dtype, work.size_bytes)
    return {name: torch.zeros_like(tensor) for name, tensor in into.items()}, stored


def _load(work: Work) -> OperationResult:
    into, stored = _saved(work)
    reader = StorageReader(_uri(work), endpoint_url=work.url, transfer=_transfer(work))
    dcp.load(into, storage_reader=reader, no_dist=True)
    return OperationResult(num_bytes_of(into), stored_bytes=stored)
