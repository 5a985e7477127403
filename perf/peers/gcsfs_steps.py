"""FsspecWriter and FsspecReader of torch.distributed.checkpoint, of one small step after the other.

All steps use one file system of gcsfs, with its defaults: fsspec keeps it, with its connections.
"""

from __future__ import annotations

import warnings
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem

import perf.peers._gcsfs  # noqa: F401  sets the environment of gcsfs
from perf._meter import steady
from perf.peers._parts import new_run
from perf.states import num_bytes_of, small_state_of, touch

if TYPE_CHECKING:
    from perf.work import Work

warnings.filterwarnings("ignore", module="torch.distributed")  # DCP warns without a process group


def _options(work: Work) -> dict[str, Any]:
    return {"token": "anon", "endpoint_url": work.url}


def _path(work: Work, run: str, step: int) -> str:
    return f"gs://{work.bucket}/{run}/step-{step}"


def _save(work: Work, run: str, step: int, state: dict[str, Any], **options: Any) -> None:
    # `sync_files` would call sync() for the whole machine, because objects have no descriptor.
    writer = _fsspec_filesystem.FsspecWriter(
        _path(work, run, step), sync_files=False, **_options(work), **options
    )
    dcp.save(state, storage_writer=writer)


async def save_steps(work: Work) -> int:
    run, state, steps = new_run(), small_state_of(work.dtype, work.size_bytes), count()

    async def save(work: Work) -> int:
        for _ in range(work.num_objects):
            _save(work, run, next(steps), dict(state))
        return work.num_objects * num_bytes_of(state)

    return await steady(save, work)


async def load_steps(work: Work) -> int:
    """Load one step after the other into the same tensors, in a cycle; return all their bytes."""
    run, state = new_run(), small_state_of(work.dtype, work.size_bytes)
    for step in range(work.num_keys):
        _save(work, run, step, dict(state), skip_instance_cache=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    async def load(work: Work) -> int:
        num_bytes = 0
        for index in range(work.num_objects):
            path = _path(work, run, index % work.num_keys)
            reader = _fsspec_filesystem.FsspecReader(path, **_options(work))
            dcp.load(target, storage_reader=reader)
            num_bytes += touch(target)
        return num_bytes

    return await steady(load, work)
