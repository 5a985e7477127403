"""torch.save and torch.load with files of gcsfs, with defaults: 5 MiB blocks, readahead cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from perf._meter import steady
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work

# Read when gcsfs is imported. Without it, gcsfs requests the bucket type over gRPC, for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcsfs  # type: ignore[import-untyped]


def _open(work: Work) -> Any:
    return gcsfs.GCSFileSystem(
        token="anon",  # noqa: S106  no secret
        endpoint_url=work.url,
        cache_timeout=0,
        skip_instance_cache=True,
    )


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    filesystem = _open(work)

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        path = f"{work.bucket}/put/{state_key(work.dtype, work.size_bytes)}"
        with filesystem.open(path, "wb") as file:
            torch.save(state, file)
        return num_bytes_of(state)

    return await steady(save, work)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    filesystem = _open(work)

    async def load(work: Work) -> int:
        path = f"{work.bucket}/{state_key(work.dtype, work.size_bytes)}"
        with filesystem.open(path, "rb") as file:
            return touch(torch.load(file, weights_only=True))

    return await steady(load, work)
