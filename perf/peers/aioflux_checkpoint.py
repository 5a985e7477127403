"""aioflux: `save` and `load` of `aioflux.checkpoint`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aioflux.checkpoint
from perf.peers import _state_file
from perf.peers._aioflux import store_options

if TYPE_CHECKING:
    from perf.work import Work


async def save_state(work: Work) -> int:
    options = store_options(work)
    return await _state_file.save(
        lambda key, state: aioflux.checkpoint.save(state, work.uri(key), **options), work
    )


async def load_state(work: Work) -> int:
    options = store_options(work)
    return await _state_file.load(
        lambda key: aioflux.checkpoint.load(work.uri(key), **options), work
    )
