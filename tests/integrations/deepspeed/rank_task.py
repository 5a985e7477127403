"""One rank that calls the checkpoint engine like DeepSpeed, controlled by commands of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from aioflux import RetryPolicy
from aioflux.integrations.deepspeed import attach
from tests.integrations.deepspeed.fake_engine import Engine


class Commands:
    """The commands."""

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


def open_worker(rank: int, world_size: int, rendezvous: str) -> Any:
    """Join the other ranks, and return the function that runs commands."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    commands = Commands()

    def do(command: str, /, **arguments: Any) -> Any:
        return getattr(commands, f"do_{command}")(**arguments)

    return do
