"""aioflux: `save` and `load` of `aioflux.checkpoint`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aioflux.checkpoint
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    state = state_of(work.dtype, work.size_bytes)
    uri = work.uri(f"put/{state_key(work.dtype, work.size_bytes)}")
    aioflux.checkpoint.save(state, uri, endpoint_url=work.url)
    return num_bytes_of(state)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    uri = work.uri(state_key(work.dtype, work.size_bytes))
    return touch(aioflux.checkpoint.load(uri, endpoint_url=work.url))
