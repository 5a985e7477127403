"""aioflux.integrations.ray: reads, writes of Parquet that commit by a manifest, checkpoints."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from aioflux import Listing, sync
from perf.peers._ray import blocks, finish, read, write  # before the import of Ray
from perf.peers._ray_train import run, train_and_save

from aioflux.integrations.ray import (  # isort: skip
    RayCheckpointer,
    read_objects,
    storage_filesystem,
    write_objects,
)

if TYPE_CHECKING:
    import ray.data
    import torch

    from perf.work import Moved, Work

__all__ = ["finish", "read_ray", "train_ray", "write_ray"]


def _dataset(work: Work) -> ray.data.Dataset:
    return read_objects(work.uri(work.prefix), columns=["bytes"], endpoint_url=work.url)


async def read_ray(work: Work) -> Moved:
    """List the objects and read them."""
    return read(_dataset, work)


def _write(work: Work) -> int:
    uri = work.uri(f"out-{uuid.uuid4().hex}")
    write_objects(blocks(work), uri, endpoint_url=work.url)
    with sync.open_store(uri, endpoint_url=work.url) as store:
        written = Listing.from_bytes(store.get("aioflux-manifest"))
        is_whole = sum(written.sizes) >= work.num_objects * work.size_bytes
        return work.num_objects * work.size_bytes if is_whole else 0


async def write_ray(work: Work) -> Moved:
    """Write the blocks as Parquet."""
    return write(_write, work)


def _loop(config: dict[str, Any]) -> dict[str, float]:
    with RayCheckpointer() as checkpoints:

        def save(number: int, state: dict[str, torch.Tensor]) -> None:
            checkpoints.report(number, state, {"step": number})

        return train_and_save(save, config)


async def train_ray(work: Work) -> Moved:
    """Train with a RayCheckpointer, whose `report` returns when the state is copied."""
    return run(_loop, storage_filesystem(work.uri(), endpoint_url=work.url), work)
