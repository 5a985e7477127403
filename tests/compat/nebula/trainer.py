"""A training run in a separate process, controlled by commands of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from aioflux.compat import nebula as nm

checkpoints: dict[str, nm.Checkpoint] = {}


def state_of(number: float, size: int = 30_000) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), float(number))}


def do_init(**arguments: Any) -> None:
    nm.init(**arguments)


def do_begin(tag: str, num_of_files: int | None = None) -> None:
    checkpoints[tag] = nm.Checkpoint(tag, num_of_files)


def do_save(tag: str, name: str, number: float, size: int = 30_000) -> None:
    checkpoints.setdefault(tag, nm.Checkpoint(tag)).save(name, state_of(number, size))


def do_save_what_does_not_pickle(tag: str) -> None:
    try:
        checkpoints[tag].save("lambda", lambda: 1)
    except Exception:  # like a program that continues after the error
        return
    raise AssertionError("it was saved")


def do_commit(tag: str) -> bool:
    return checkpoints[tag].commit()


def do_flush() -> None:
    nm.flush_persistence()


def do_shutdown() -> None:
    nm.shutdown()


def do_latest(name: str) -> Any:
    found = nm.get_latest_checkpoint()
    if found is None:
        return None
    return found.tag, float(found.load(name)["weight"][0]), nm.list_checkpoints()[found.tag]


def do(command: str, /, **arguments: Any) -> Any:
    return globals()[f"do_{command}"](**arguments)


def open_worker(rank: int, world_size: int, rendezvous: str) -> Any:
    """Join the process group, and return the function that runs commands."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
    return do
