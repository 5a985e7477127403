"""One rank of a job that saves what it is told to, line by line.

    python -m tests.checkpoint.dcp.rank_task <settings as JSON>

Each line of the input is a command as JSON, each line of the output what became of it.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from aioflux import RetryPolicy, TransferOptions
from aioflux.checkpoint.dcp import StorageWriter
from tests.checkpoint.dcp.states import UnpicklableError

_KINDS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
MIB = 1024 * 1024


def full_state(seed: int, num_rows: int = 37) -> dict[str, Any]:
    """The state of all ranks together, before it is cut."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(num_rows, 24, generator=generator),
        "columns": torch.randint(0, 9, (8, 25), generator=generator),
        "whole": torch.randn(11, generator=generator).to(torch.bfloat16),
        "step": seed,
    }


def own_state(seed: int, num_rows: int) -> dict[str, Any]:
    """The part of one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in full_state(seed, num_rows).items():
        if name in _KINDS:
            state[name] = distribute_tensor(value, mesh, [_KINDS[name]])
            assert isinstance(state[name], DTensor)
        else:
            state[name] = value
    state[f"own-{dist.get_rank()}"] = torch.full((3,), float(dist.get_rank()))
    return state


class _Planner(DefaultSavePlanner):
    """Fails on one rank, with an error that does not pickle, or fills its disk."""

    def __init__(self, fails: str, **options: Any) -> None:
        super().__init__(**options)
        self.fails = fails

    def resolve_data(self, write_item: Any) -> Any:
        if self.fails == "unpicklable":
            raise UnpicklableError(7, io.StringIO())
        return super().resolve_data(write_item)


def save(command: dict[str, Any]) -> str:
    rank = dist.get_rank()
    state = own_state(command["seed"], command.get("num_rows", 37))
    fails = command.get("fails", "") if rank == command.get("fails_on", 1) else ""
    if fails == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["room"], resource.RLIM_INFINITY))
    writer = StorageWriter(
        command["uri"],
        retry=RetryPolicy(max_attempts=3, initial_seconds=0.01, max_seconds=0.1),
        transfer=TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB),
        **command.get("options", {}),
    )
    options = {"storage_writer": writer, "planner": _Planner(fails, **command.get("planner", {}))}
    try:
        if command["op"] == "process":
            options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            dcp.async_save(state, **options).result(120)
        else:
            dcp.save(state, use_collectives=command.get("use_collectives", True), **options)
    except CheckpointException as exc:
        told = {str(rank): str(error) for rank, (error, _) in exc.failures.items()}
        return json.dumps({"failures": told})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return json.dumps({"saved": command["seed"]})


def answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(settings: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{settings['port']}",
        rank=settings["rank"],
        world_size=settings["world_size"],
    )
    answer("ready")
    for line in sys.stdin:
        answer(save(json.loads(line)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
