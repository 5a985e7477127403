"""Commands of ranks that save and load sharded states; see `ranks`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from aioflux import RetryPolicy
from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from tests.checkpoint.dcp.ranks import run
from tests.patience import PATIENT

SHARDINGS: dict[str, tuple[list[Any], list[Placement]]] = {
    "rows of 4": ([0, 1, 2, 3], [Shard(0)]),
    "rows of 3": ([0, 1, 2], [Shard(0)]),
    "columns of 4": ([0, 1, 2, 3], [Shard(1)]),
    "columns of 3": ([0, 1, 2], [Shard(1)]),
    "replicas": ([0, 1, 2, 3], [Replicate()]),
    "rows and columns": ([[0, 1], [2, 3]], [Shard(0), Shard(1)]),
    "replicas of rows": ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
    "rows twice": ([[0, 1], [2, 3]], [Shard(0), Shard(0)]),
    "one": ([2], [Shard(0)]),
}
"""Ranks and placements by name."""


def full_state(seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """The complete tensors, whose sizes cannot be divided evenly among the ranks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "odd": torch.randn(37 * scale, 25, generator=generator),
        "half": torch.randn(11, 14 * scale, 3, generator=generator).to(torch.bfloat16),
        "whole numbers": torch.randint(-9, 9, (5, 6), generator=generator),
        "few rows": torch.randn(2, 7, generator=generator),
    }


def sharded(tensors: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    ranks, placements = SHARDINGS[name]
    mesh = DeviceMesh("cpu", ranks)
    return {
        # Every rank has the complete tensors, so no communication is needed.
        key: distribute_tensor(each, mesh, placements, src_data_rank=None)
        for key, each in tensors.items()
    }


def local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: each.to_local()
        for name, each in state.items()
        if each.device_mesh.get_coordinate() is not None
    }


def save(command: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = sharded(
        full_state(command["seed"], command["scale"]), command["sharding"]
    )
    state["step"] = command["seed"]
    if command["writer"] == "ours":
        writer: Any = StorageWriter(command["uri"], timeouts=PATIENT, **command.get("options", {}))
    else:
        writer = dcp.FileSystemWriter(command["uri"])
    dcp.save(state, storage_writer=writer)
    return {}


def load(command: dict[str, Any]) -> dict[str, Any]:
    saved = full_state(command["seed"], command["scale"])
    blank = {name: torch.zeros_like(each) for name, each in saved.items()}
    state: dict[str, Any] = sharded(blank, command["sharding"])
    state["step"] = None
    quick = RetryPolicy(max_attempts=2, initial_seconds=0.01, max_seconds=0.02)
    no_dist = command.get("alone") is not None
    group = dist.group.WORLD if command.get("shares", not no_dist) else None
    reader = StorageReader(command["uri"], process_group=group, retry=quick, timeouts=PATIENT)
    if no_dist and dist.get_rank() != command["alone"]:
        return {}
    try:
        dcp.load(state, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as exc:
        return {
            "failures": {
                str(rank): [type(error).__name__, str(error)]
                for rank, (error, _) in exc.failures.items()
            }
        }
    assert state.pop("step") == command["seed"]
    expected, found = local(sharded(saved, command["sharding"])), local(state)
    assert expected.keys() == found.keys()
    for name, each in expected.items():
        assert torch.equal(each, found[name]), name
    return {"num_bytes": sum(each.nbytes for each in found.values())}


def do(command: dict[str, Any]) -> dict[str, Any]:
    return {"save": save, "load": load}[command["op"]](command)


def main() -> None:
    warnings.simplefilter("ignore")
    run(do)


if __name__ == "__main__":
    main()
