"""Commands of ranks that save; see `ranks`."""

from __future__ import annotations

import io
import os
import resource
import signal
import warnings
from functools import cache
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
from tests.bridge.patience import be_patient
from tests.checkpoint.dcp.ranks import run
from tests.checkpoint.dcp.states import UnpicklableError
from tests.patience import PATIENCE_SECONDS, PATIENT

_KINDS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
MIB = 1024 * 1024


def full_state(seed: int, num_rows: int = 37) -> dict[str, Any]:
    """The complete state, before it is sharded."""
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
    """A planner that can raise an error that cannot be pickled."""

    def __init__(self, fails: str, **options: Any) -> None:
        super().__init__(**options)
        self.fails = fails

    def resolve_data(self, write_item: Any) -> Any:
        if self.fails == "unpicklable":
            raise UnpicklableError(7, io.StringIO())
        return super().resolve_data(write_item)


@cache
def background_store() -> dist.TCPStore:
    """The TCPStore through which the background processes of all ranks connect.

    DCP itself would choose a free port and bind it later, when another process may use the port.
    """
    is_first = dist.get_rank() == 0
    ports = [0]
    if is_first:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports = [store.port]
    dist.broadcast_object_list(ports)
    if not is_first:
        store = dist.TCPStore("127.0.0.1", ports[0])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    os.environ.update(address, DCP_USE_PREFIX_STORE="1")
    return store


def save(command: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    state = own_state(command["seed"], command.get("num_rows", 37))
    fails = command.get("fails", "") if rank == command.get("fails_on", 1) else ""
    if fails == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["room"], resource.RLIM_INFINITY))
    writer = StorageWriter(
        command["uri"],
        retry=RetryPolicy(max_attempts=3, initial_seconds=0.01, max_seconds=0.1),
        timeouts=PATIENT,
        transfer=TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB),
        **command.get("options", {}),
    )
    options = {"storage_writer": writer, "planner": _Planner(fails, **command.get("planner", {}))}
    try:
        if command["op"] == "process":
            background_store()
            options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            dcp.async_save(state, **options).result(PATIENCE_SECONDS)
        else:
            dcp.save(state, use_collectives=command.get("use_collectives", True), **options)
    except CheckpointException as exc:
        errors = {str(rank): str(error) for rank, (error, _) in exc.failures.items()}
        return {"failures": errors}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return {"saved": command["seed"]}


def main() -> None:
    warnings.simplefilter("ignore")
    be_patient()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run(save)


if __name__ == "__main__":
    main()
