"""torch.save with BlobWriter of google-cloud-storage and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from perf._meter import steady
from perf.peers.google import open_bucket
from perf.states import num_bytes_of, state_of
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    bucket = open_bucket(work)

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        blob = bucket.blob(f"put/{state_key(work.dtype, work.size_bytes)}")
        # torch.save flushes at the end; without `ignore_flush`, BlobWriter raises an error.
        with blob.open("wb", ignore_flush=True) as file:
            torch.save(state, file)
        return num_bytes_of(state)

    return await steady(save, work)
