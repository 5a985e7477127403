"""torch: `dcp.async_save` at its defaults, into memory of the process, after two saves."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from perf.states import num_bytes_of, state_of

if TYPE_CHECKING:
    from perf.work import Work

_under_way: list[Any] = []
"""What the end of the process drops."""


def _save(work: Work) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves in a single process, and overwrites
        return dcp.async_save(
            state_of(work.dtype, work.size_bytes),
            storage_writer=FsspecWriter("memory://perf/state", sync_files=False),
            no_dist=True,
        )


@lru_cache(maxsize=1)
def prepare(work: Work) -> None:
    """Save twice, so that what is measured is warm."""
    for _ in range(2):
        _save(work).result()


async def stage(work: Work) -> int:
    """Save a state as far as training waits for it, and return the bytes of its tensors."""
    prepare(work)
    _under_way.append(_save(work))
    return num_bytes_of(state_of(work.dtype, work.size_bytes))
