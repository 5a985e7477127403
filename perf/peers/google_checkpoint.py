"""torch.save with BlobWriter of google-cloud-storage and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from perf.peers import _state_file
from perf.peers.google import open_bucket

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    bucket = open_bucket(work)

    def write(key: str, state: dict[str, torch.Tensor]) -> None:
        # torch.save flushes at the end; without `ignore_flush`, BlobWriter raises an error.
        with bucket.blob(key).open("wb", ignore_flush=True) as file:
            torch.save(state, file)

    return await _state_file.save(write, work)
