"""s3torchconnector: torch.save and torch.load with the files of S3Checkpoint and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from s3torchconnector import S3Checkpoint  # type: ignore[import-not-found, import-untyped]

from perf._meter import steady
from perf.peers._s3torchconnector import options
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    checkpoint = S3Checkpoint(**options(work))

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        with checkpoint.writer(work.uri(f"put/{state_key(work.dtype, work.size_bytes)}")) as file:
            torch.save(state, file)
        return num_bytes_of(state)

    return await steady(save, work)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    checkpoint = S3Checkpoint(**options(work))

    async def load(work: Work) -> int:
        with checkpoint.reader(work.uri(state_key(work.dtype, work.size_bytes))) as file:
            return touch(torch.load(file, weights_only=True))

    return await steady(load, work)
