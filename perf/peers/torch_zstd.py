"""torch: the ZStandard extension of DCP, as FileSystemWriter and FileSystemReader use it."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint._extension import ZStandard

from perf.weights import weights_of
from perf.work import OperationResult

if TYPE_CHECKING:
    from perf.work import Work


def prepare(work: Work) -> None:
    """Create the state, and its compressed form."""
    weights_of(work.dtype, work.size_bytes)
    if work.operation == "decompress":
        _compressed(work.dtype, work.size_bytes)


class _Counter(io.RawIOBase):
    """Counts written bytes and discards them."""

    num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size


async def compress(work: Work) -> OperationResult:
    """Compress the items of a state into a file that discards them."""
    stored = 0
    for tensor in weights_of(work.dtype, work.size_bytes).values():
        counter = _Counter()
        stream = ZStandard().transform_to(cast("IO[bytes]", counter))
        torch.save(tensor, stream)
        stream.close()
        stored += counter.num_bytes
    return OperationResult(work.size_bytes, stored_bytes=stored)


async def decompress(work: Work) -> OperationResult:
    """Decompress the items of a state into existing tensors."""
    stored = 0
    for packed, tensor in _compressed(work.dtype, work.size_bytes):
        stream = ZStandard().transform_from(io.BytesIO(packed))
        tensor.copy_(torch.load(io.BytesIO(stream.read(-1)), weights_only=True))
        stored += len(packed)
    return OperationResult(work.size_bytes, stored_bytes=stored)


@lru_cache(maxsize=1)
def _compressed(dtype: str, size_bytes: int) -> list[tuple[bytes, torch.Tensor]]:
    found = []
    for tensor in weights_of(dtype, size_bytes).values():
        # Closing the stream closes `output`, so read its value before.
        with io.BytesIO() as output:
            stream = ZStandard().transform_to(output)
            torch.save(tensor, stream)
            stream.flush(1)  # type: ignore[call-arg]  # zstandard's FLUSH_FRAME
            found.append((output.getvalue(), torch.zeros_like(tensor)))
    return found
