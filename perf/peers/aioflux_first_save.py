"""aioflux: the first `Checkpointer.save_async` of a process, after `Checkpointer.prepare`."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

from aioflux.checkpoint import Checkpointer
from perf.states import num_bytes_of, state_of
from perf.work import WARM_UP_BYTES

if TYPE_CHECKING:
    from perf.work import Work

_TRAINING_SECONDS = 1.0
"""Time between the preparation and the first save: a few training steps."""


@lru_cache(maxsize=1)
def _opened(work: Work) -> Checkpointer:
    return Checkpointer(work.uri("first"), endpoint_url=work.url, keep_last=1)


def prepare(work: Work) -> None:
    """Create the state, prepare its saves, and wait for as long as some training steps take."""
    state = state_of(work.dtype, work.size_bytes)
    _opened(work).prepare(state)
    time.sleep(_TRAINING_SECONDS)


async def stage(work: Work) -> int:
    if work.size_bytes <= WARM_UP_BYTES:
        return work.size_bytes  # no warm-up: the first save is measured
    state = state_of(work.dtype, work.size_bytes)
    _opened(work).save_async(0, state)
    return num_bytes_of(state)
