"""torch.save and torch.load with files of gcsfs, with defaults: 5 MiB blocks, readahead cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from perf.peers import _state_file
from perf.peers._gcsfs import open_filesystem

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    filesystem = open_filesystem(work, skip_instance_cache=True)

    def write(key: str, state: dict[str, torch.Tensor]) -> None:
        with filesystem.open(f"{work.bucket}/{key}", "wb") as file:
            torch.save(state, file)

    return await _state_file.save(write, work)


async def load_state(work: Work) -> int:
    filesystem = open_filesystem(work, skip_instance_cache=True)

    def read(key: str) -> Any:
        with filesystem.open(f"{work.bucket}/{key}", "rb") as file:
            return torch.load(file, weights_only=True)

    return await _state_file.load(read, work)
