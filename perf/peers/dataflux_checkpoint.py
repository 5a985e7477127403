"""gcs-torch-dataflux: torch.save and torch.load with the file objects of DatafluxCheckpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from perf._meter import steady
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

try:
    from dataflux_pytorch import dataflux_checkpoint  # type: ignore[import-not-found]
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        f"{exc.name} is missing (pip install -e '.[perf-loading]')", name=exc.name
    ) from exc

if TYPE_CHECKING:
    from perf.work import Work


def _open(work: Work) -> Any:
    os.environ["STORAGE_EMULATOR_HOST"] = work.url
    return dataflux_checkpoint.DatafluxCheckpoint(project_name="perf", bucket_name=work.bucket)


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    checkpoint = _open(work)

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        with checkpoint.writer(f"put/{state_key(work.dtype, work.size_bytes)}") as file:
            torch.save(state, file)
        return num_bytes_of(state)

    return await steady(save, work)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    checkpoint = _open(work)

    async def load(work: Work) -> int:
        with checkpoint.reader(state_key(work.dtype, work.size_bytes)) as file:
            return touch(torch.load(file, weights_only=True))

    return await steady(load, work)
