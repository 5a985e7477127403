"""zstandard: level 3, one call for the memory of a tensor, two threads for compression."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import zstandard

from perf.weights import weights_of
from perf.work import OperationResult

if TYPE_CHECKING:
    from perf.work import Work

_LEVEL = 3
_NUM_THREADS = 2


def prepare(work: Work) -> None:
    """Create the state, and its compressed form."""
    weights_of(work.dtype, work.size_bytes)
    if work.operation == "decompress":
        _compressed(work.dtype, work.size_bytes)


async def compress(work: Work) -> OperationResult:
    """Compress the memory of each tensor."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=_NUM_THREADS)
    tensors = weights_of(work.dtype, work.size_bytes).values()
    stored = sum(len(compressor.compress(_memory(each))) for each in tensors)
    return OperationResult(work.size_bytes, stored_bytes=stored)


async def decompress(work: Work) -> OperationResult:
    """Decompress the tensors into existing memory."""
    stored = 0
    decompressor = zstandard.ZstdDecompressor()
    for packed, tensor in _compressed(work.dtype, work.size_bytes):
        decompressor.stream_reader(packed).readinto(_memory(tensor))
        stored += len(packed)
    return OperationResult(work.size_bytes, stored_bytes=stored)


@lru_cache(maxsize=1)
def _compressed(dtype: str, size_bytes: int) -> list[tuple[bytes, torch.Tensor]]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=_NUM_THREADS)
    return [
        (compressor.compress(_memory(tensor)), torch.zeros_like(tensor))
        for tensor in weights_of(dtype, size_bytes).values()
    ]


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
