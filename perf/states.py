"""State dicts to save and load: tensors with the shapes of a transformer's layers, in one dtype.

`python -m perf.states DTYPE SIZE_BYTES PATH` writes a state with torch.save, and prints the size of
the file and its crc32c in base64.
"""

from __future__ import annotations

import base64
import json
import mmap
import random
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import google_crc32c
import torch

__all__ = ["DTYPES", "num_bytes_of", "small_state_of", "state_of", "touch"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_BLOCK = random.Random(0).randbytes(1 << 20)  # noqa: S311  no secret
_WIDTH = 2048
_SHAPES = ((_WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,), (_WIDTH, 4 * _WIDTH), (4 * _WIDTH, _WIDTH))
"""Shapes of the tensors of one layer."""
_PAGE_BYTES = 4096
_NUM_SMALL = 10
"""Number of tensors of a small state."""


@lru_cache(maxsize=2)  # and the small state that opens the connections
def state_of(dtype: str, size_bytes: int) -> dict[str, torch.Tensor]:
    """Return a state whose tensors have `size_bytes` in all; all of their memory is written.

    The last tensor has one dimension and the remaining size.
    """
    kind = DTYPES[dtype]
    state: dict[str, torch.Tensor] = {}
    num_missing = size_bytes
    while num_missing:
        shape = _SHAPES[len(state) % len(_SHAPES)]
        tensor = torch.empty(shape, dtype=kind)
        if tensor.nbytes > num_missing:
            tensor = torch.empty(num_missing // kind.itemsize, dtype=kind)
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for at in range(0, len(view), len(_BLOCK)):
            view[at : at + len(_BLOCK)] = _BLOCK[: len(view) - at]
        state[f"layers.{len(state) // len(_SHAPES)}.{len(state) % len(_SHAPES)}"] = tensor
        num_missing -= tensor.nbytes
    return state


def small_state_of(dtype: str, size_bytes: int) -> dict[str, torch.Tensor]:
    """Return a state of several tensors of the same size, which have `size_bytes` in all."""
    values = torch.cat([tensor.view(-1) for tensor in state_of(dtype, size_bytes).values()])
    pieces = values.chunk(_NUM_SMALL)
    return {f"layers.{index}": piece.clone() for index, piece in enumerate(pieces)}


def num_bytes_of(state: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def touch(state: dict[str, torch.Tensor]) -> int:
    """Read one byte of each memory page of all tensors; return the size of all tensors."""
    for tensor in state.values():
        tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].sum()
    return num_bytes_of(state)


def main() -> None:
    """Write the state that the arguments describe."""
    dtype, size_bytes, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    state: Any = state_of(dtype, size_bytes)
    torch.save(state, target)
    with target.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        crc32c = 0
        for at in range(0, len(data), 1 << 20):
            crc32c = google_crc32c.extend(crc32c, data[at : at + (1 << 20)])
        size = len(data)
    print(json.dumps([size, base64.b64encode(crc32c.to_bytes(4, "big")).decode()]))


if __name__ == "__main__":
    main()
