"""One rank that drives the checkpoint engine as DeepSpeed does, told line by line what to do.

python -m tests.integrations.deepspeed.rank_task '{"rank": 0, "world_size": 2, "meeting": ...}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from aioflux import RetryPolicy
from aioflux.integrations.deepspeed import attach
from tests.integrations.deepspeed.stand_in import Engine


class Desk:
    """What the lines name."""

    def __init__(self) -> None:
        self.engine = Engine()

    def do_attach(self, **options: Any) -> None:
        self.engine = Engine()
        attach(self.engine, retry=RetryPolicy(max_attempts=1), **options)

    def do_save(self, save_dir: str, tag: str, number: float, fails: bool = False) -> bool:
        self.engine.number = number
        self.engine.fails = fails
        return bool(self.engine.save_checkpoint(save_dir, tag))

    def do_step(self) -> None:
        self.engine.step()

    def do_load(self, load_dir: str, tag: str | None = None) -> Any:
        self.engine.number = -1
        path, _ = self.engine.load_checkpoint(load_dir, tag)
        return path, self.engine.number

    def do_cleanup(self) -> None:
        self.engine.checkpoint_engine.cleanup()


def say(told: list[Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings['meeting']}",
        rank=settings["rank"],
        world_size=settings["world_size"],
    )
    desk = Desk()
    say([True, "ready"])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            told = [True, getattr(desk, f"do_{name}")(**arguments)]
        except Exception as exc:
            told = [False, f"{type(exc).__name__}: {exc}"]
        say(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
