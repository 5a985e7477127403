"""aioflux: the part of a save with Nebula's interface for which the training waits."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import aioflux.compat.nebula as nm
from perf.states import num_bytes_of, state_of

if TYPE_CHECKING:
    from perf.work import Work


@lru_cache(maxsize=1)
def _init(uri: str, url: str) -> None:
    nm.init(uri, persistent_time_interval=0, endpoint_url=url)


def _save(work: Work, tag: str) -> int:
    state = state_of(work.dtype, work.size_bytes)
    nm.Checkpoint(tag, -2).save("model", state)
    return num_bytes_of(state)


def prepare(work: Work) -> None:
    """Save as many tags as the memory keeps, so that the measured save reuses memory."""
    _init(work.uri("nebula"), work.url)
    for step in range(3):
        checkpoint = nm.Checkpoint(f"step{step}", -2)
        checkpoint.save("model", state_of(work.dtype, work.size_bytes))
        checkpoint.commit()
        nm.flush_persistence()


async def stage(work: Work) -> int:
    """Save a state to memory, and return the bytes of its tensors; the upload runs later."""
    _init(work.uri("nebula"), work.url)
    return _save(work, "measured")


def finish(work: Work) -> None:
    """Stop the node daemon, which would continue after the exit of this process."""
    nm.shutdown()
