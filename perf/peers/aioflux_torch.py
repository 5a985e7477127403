"""torch.save and torch.load with the files of `open_writer` and `open_reader`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aioflux.checkpoint import open_reader, open_writer
from perf.peers import _state_file
from perf.peers._aioflux import store_options

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    options = store_options(work)

    def write(key: str, state: dict[str, torch.Tensor]) -> None:
        with open_writer(work.uri(key), **options) as file:
            torch.save(state, file)

    return await _state_file.save(write, work)


async def load_state(work: Work) -> int:
    options = store_options(work)

    def read(key: str) -> Any:
        with open_reader(work.uri(key), **options) as file:
            return torch.load(file, weights_only=True)

    return await _state_file.load(read, work)
