"""torch: `dcp.async_save` with defaults, into memory of the process, after two warm-up saves."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from perf.states import num_bytes_of, state_of

if TYPE_CHECKING:
    from perf.work import Work

_futures: list[Any] = []
"""Futures of saves that nothing waits for; the exit of the process ends them."""


def _save(work: Work) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about a single process and overwriting
        return dcp.async_save(
            state_of(work.dtype, work.size_bytes),
            storage_writer=FsspecWriter("memory://perf/state", sync_files=False),
            no_dist=True,
        )


@lru_cache(maxsize=1)
def prepare(work: Work) -> None:
    """Save twice, as a warm-up."""
    for _ in range(2):
        _save(work).result()


async def stage(work: Work) -> int:
    prepare(work)
    _futures.append(_save(work))
    return num_bytes_of(state_of(work.dtype, work.size_bytes))
