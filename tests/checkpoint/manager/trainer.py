"""A training run in a separate process, for tests that kill the process or wait for its exit.

Each line on stdout is an event, such as `staged 2`. The state of a step depends only on its number.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint.manager.worker_process import SLOW, STUBBORN, Checkpointer, uploader_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 60_000


@cache
def mesh_of(world_size: int) -> DeviceMesh:
    """The device mesh of all ranks; cached, because creating a mesh needs communication."""
    return init_device_mesh("cpu", (world_size,))


def state_of(step: int, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """The state of a step. The tensor `cut` is sharded by rank, `same` is equal on all ranks."""
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
    """Return whether a loaded, complete state is the state of a step."""
    expected = state_of(step)
    return bool(
        torch.equal(state["model"]["cut"], expected["model"]["cut"])
        and torch.equal(state["model"]["same"], expected["model"]["same"])
        and state["optimizer"] == expected["optimizer"]
    )


def say(*words: object) -> None:
    """Print a line with one write, so that lines of several processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(plan: dict[str, Any]) -> None:
    """Save one step after another, and print which steps are staged and committed.

    The first line has the id of the uploader process, or 0 if this process uploads.
    """
    rank, world_size = plan.get("rank", 0), plan.get("world_size", 1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=plan["rendezvous"], rank=rank, world_size=world_size
        )
    checkpointer = Checkpointer(plan["uri"], **plan.get("options", {}))
    has_uploader = plan.get("options", {}).get("staging") == "process"
    say("ready", uploader_of(os.getpid()) if has_uploader else 0)
    for number in range(plan["steps"]):
        step = plan.get("first", 1) + number
        state = state_of(step, rank=rank, world_size=world_size)
        handle = checkpointer.save_async(plan.get("only_step", step), state)
        say("staged", step)
        if plan["wait"]:
            handle.result()
            say("committed", step)
    if plan["close"]:
        checkpointer.close()
        if world_size > 1:
            dist.destroy_process_group()


def leave(uri: str, steps: Sequence[int], staging: Literal["thread", "process"]) -> None:
    """Save steps, and exit without waiting for them."""
    checkpointer = Checkpointer(uri, staging=staging, retry=STUBBORN, timeouts=SLOW)
    for step in steps:
        checkpointer.save_async(step, {"a": torch.ones(3)})
