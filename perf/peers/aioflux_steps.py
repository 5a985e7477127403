"""aioflux: `Checkpointer.save` and `Checkpointer.load` with defaults, one step after the other."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from aioflux.checkpoint import Checkpointer
from perf._meter import steady
from perf.peers._parts import new_run
from perf.states import num_bytes_of, small_state_of, touch

if TYPE_CHECKING:
    from perf.work import Work


def _open(work: Work, run: str) -> Checkpointer:
    return Checkpointer(work.uri(run), endpoint_url=work.url)


async def save_steps(work: Work) -> int:
    state, steps = small_state_of(work.dtype, work.size_bytes), count()
    with _open(work, new_run()) as checkpointer:

        async def save(work: Work) -> int:
            for _ in range(work.num_objects):
                checkpointer.save(next(steps), state)
            return work.num_objects * num_bytes_of(state)

        return await steady(save, work)


async def load_steps(work: Work) -> int:
    """Load one step after the other, in a cycle, and return the bytes of all steps' tensors."""
    run = new_run()
    with _open(work, run) as checkpointer:
        for step in range(work.num_keys):
            checkpointer.save(step, small_state_of(work.dtype, work.size_bytes))
    with _open(work, run) as checkpointer:

        async def load(work: Work) -> int:
            steps = (index % work.num_keys for index in range(work.num_objects))
            return sum(touch(checkpointer.load(step)) for step in steps)

        return await steady(load, work)
