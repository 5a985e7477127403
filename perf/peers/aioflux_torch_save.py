"""torch.save to an object through `aioflux.checkpoint.open_writer`, without staging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioflux.checkpoint import open_writer
from perf.states import num_bytes_of, state_of
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    state = state_of(work.dtype, work.size_bytes)
    uri = work.uri(f"put/{state_key(work.dtype, work.size_bytes)}")
    with open_writer(uri, endpoint_url=work.url) as file:
        torch.save(state, file)
    return num_bytes_of(state)
