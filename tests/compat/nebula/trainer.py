"""A training run in a process of its own, told line by line what to do.

    python -m tests.compat.nebula.trainer '{"rank": 0, "world_size": 2, "meeting": "/tmp/x/meet"}'

Each line is a JSON list: a name, and arguments by name. Each answer is one, too: whether it went
well, and what came of it.
"""

from __future__ import annotations

import json
import sys
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
    except Exception:  # as a program that goes on
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


def say(told: list[Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if settings["world_size"] > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings['meeting']}",
            rank=settings["rank"],
            world_size=settings["world_size"],
        )
    say([True, "ready"])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            told = [True, globals()[f"do_{name}"](**arguments)]
        except Exception as exc:
            told = [False, f"{type(exc).__name__}: {exc}"]
        say(told)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
