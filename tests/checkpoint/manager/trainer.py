"""A training run in a process of its own, for tests that kill it.

    python -m tests.checkpoint.manager.trainer '{"uri": ..., "steps": 3}'
    python -m tests.checkpoint.manager.trainer          a line of such plans each, trained in forks

Each line on stdout is an event, such as `staged 2`, in forks with the number of the process before
it; the state of a step is known by its number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from aioflux.checkpoint import Checkpointer

SIZE = 60_000


@cache
def mesh_of(world_size: int) -> DeviceMesh:
    """The ranks; made once, because they talk when it is made."""
    return init_device_mesh("cpu", (world_size,))


def state_of(step: int, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """What a step's checkpoint holds; one tensor is cut by ranks, one is the same on all."""
    whole = torch.full((8, SIZE), float(step)) + torch.arange(8.0)[:, None]
    mine: Any = whole
    if world_size > 1:
        part = whole.chunk(world_size)[rank]
        mine = DTensor.from_local(part, mesh_of(world_size), [Shard(0)], run_check=False)
    return {
        "model": {"cut": mine, "same": torch.full((SIZE,), float(step))},
        "optimizer": {"step": step, "groups": [{"lr": 0.1 * step, "betas": (0.9, 0.99)}]},
        f"rank{rank}": {"number": rank},
    }


def is_state_of(step: int, state: dict[str, Any]) -> bool:
    """Whether a state that was loaded whole is that of a step."""
    told = state_of(step)
    return bool(
        torch.equal(state["model"]["cut"], told["model"]["cut"])
        and torch.equal(state["model"]["same"], told["model"]["same"])
        and state["optimizer"] == told["optimizer"]
    )


def say(*words: object) -> None:
    """One write for each line, so that those of several processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(plan: dict[str, Any], *before: object) -> None:
    rank, world_size = plan.get("rank", 0), plan.get("world_size", 1)
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=plan["meeting"], rank=rank, world_size=world_size
        )
    checkpointer = Checkpointer(plan["uri"], **plan.get("options", {}))
    say(*before, "ready")
    for number in range(plan["steps"]):
        step = plan.get("first", 1) + number
        state = state_of(step, rank=rank, world_size=world_size)
        handle = checkpointer.save_async(plan.get("only_step", step), state)
        say(*before, "staged", step)
        if plan.get("wait", True):
            handle.result()
            say(*before, "committed", step)
    if plan.get("close", True):
        checkpointer.close()
        say(*before, "closed")
    if world_size > 1:
        dist.destroy_process_group()


def fork_trainers() -> None:
    """Fork a process for each line: torch is imported once for all."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    say("ready")
    for line in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            train(json.loads(line), os.getpid())
            os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(json.loads(sys.argv[1]))
    else:
        fork_trainers()
