"""aioflux: `Checkpointer.save_async` with defaults, after a warm-up; training during uploads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from aioflux.checkpoint import Checkpointer
from perf.states import num_bytes_of, state_of
from perf.training import train
from perf.work import WARM_UP_BYTES

if TYPE_CHECKING:
    from aioflux.checkpoint import SaveHandle
    from perf.work import Work


@lru_cache(maxsize=1)
def _ready(work: Work) -> Checkpointer:
    """Return a Checkpointer that has saved the state twice."""
    checkpointer = Checkpointer(
        work.uri("async"), endpoint_url=work.url, staging=_staging(work), keep_last=1
    )
    state = state_of(work.dtype, work.size_bytes)
    for step in range(2):
        checkpointer.save(step, state)
    return checkpointer


def _staging(work: Work) -> str:
    return "process" if work.num_workers else "thread"


def prepare(work: Work) -> None:
    """Save twice, as a warm-up."""
    if work.operation == "train_alone":
        state_of(work.dtype, work.size_bytes)
    else:
        _ready(work)


async def stage(work: Work) -> int:
    state = state_of(work.dtype, work.size_bytes)
    _ready(work).save_async(2, state)
    return num_bytes_of(state)


def _num_steps(work: Work) -> int:
    """Return the number of training steps; a warm-up has few."""
    return work.in_flight if work.size_bytes > WARM_UP_BYTES else 5


async def train_alone(work: Work) -> int:
    """Train without saves."""
    train(_num_steps(work), lambda _: None)
    return work.size_bytes


async def train_saving(work: Work) -> int:
    """Train for the same number of steps, and start a save as soon as the previous is done."""
    checkpointer, state = _ready(work), state_of(work.dtype, work.size_bytes)
    handles: list[SaveHandle] = []

    def save(step: int) -> None:
        if not handles or handles[-1].done():
            handles.append(checkpointer.save_async(2 + step, state))

    train(_num_steps(work), save)
    return work.size_bytes
