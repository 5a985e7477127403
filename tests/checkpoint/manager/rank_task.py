"""A process that runs commands on a Checkpointer.

Each line of standard input is a command as JSON, each line of standard output its result as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.checkpoint.manager.trainer import is_state_of, state_of
from tests.checkpoint.manager.worker_process import FAST, SLOW, STUBBORN, Checkpointer, uploader_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint import SaveHandle


class Task:
    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        self.rank, self.world_size = rank, world_size
        if world_size > 1:
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=world_size
            )
        self.checkpointer: Checkpointer | None = None
        self.handles: dict[int, SaveHandle] = {}

    def open(self, uri: str, *, stubborn: Sequence[int] = (), **options: Any) -> None:
        """Build the Checkpointer; on the ranks `stubborn`, one that retries without an end."""
        retry = STUBBORN if self.rank in stubborn else FAST
        self.checkpointer = Checkpointer(uri, retry=retry, timeouts=SLOW, **options)

    def prepare(self) -> int:
        """Prepare the first save, and return the number of arenas that were allocated so far."""
        assert self.checkpointer is not None
        self.checkpointer.prepare(self._state(0))
        return self.checkpointer._stager._num_arenas

    def begin(self, step: int, value: int | None = None, **options: Any) -> None:
        assert self.checkpointer is not None
        state = self._state(step if value is None else value)
        self.handles[step] = self.checkpointer.save_async(step, state, **options)

    def _state(self, value: int) -> dict[str, Any]:
        return state_of(value, rank=self.rank, world_size=self.world_size)

    def result(self, step: int, timeout: float | None = None) -> list[Any]:
        result = self.handles[step].result(timeout)
        return [result.step, result.num_bytes]

    def save(self, step: int, value: int | None = None) -> list[Any]:
        self.begin(step, value)
        return self.result(step)

    def save_broken(self, step: int) -> None:
        assert self.checkpointer is not None
        self.checkpointer.save(step, {"same": torch.ones(2), "lambda": lambda: None})

    def load(self) -> list[Any]:
        assert self.checkpointer is not None
        into = self._state(-1)
        self.checkpointer.load(into=into)
        step = self.checkpointer.loaded_step
        assert step is not None
        expected = self._state(int(into["model"]["same"][0].item()))
        cut, whole = into["model"]["cut"], expected["model"]["cut"]
        if self.world_size > 1:
            cut, whole = cut.to_local(), whole.to_local()
        is_same = torch.equal(cut, whole) and into["optimizer"] == expected["optimizer"]
        return [step, bool(is_same)]

    def load_whole(self) -> list[Any]:
        assert self.checkpointer is not None
        state = self.checkpointer.load()
        return [self.checkpointer.loaded_step, is_state_of(state["optimizer"]["step"], state)]

    def save_own(self, step: int) -> None:
        """Save values that differ on each rank, with integer keys."""
        assert self.checkpointer is not None
        mine = {5: self.rank, 7: [torch.full((2,), self.rank)], "text": {}}
        self.checkpointer.save(step, {f"rank{self.rank}": mine, "both": {1: 2}})

    def load_own(self) -> list[str]:
        """Load into a changed state and into an empty state, and return both as text."""
        assert self.checkpointer is not None
        changed = {f"rank{self.rank}": {5: -1, 6: 0, 7: []}, "both": {1: 0}}
        empty: dict[str, Any] = {f"rank{self.rank}": {}, "both": {}}
        return [str(self.checkpointer.load(into=into)) for into in (changed, empty)]

    def save_tied(self, step: int) -> int:
        """Save tensors that are the same on all ranks, each under two names."""
        assert self.checkpointer is not None
        weights = [torch.full((100_000,), float(number)) for number in range(5)]
        names = {f"first{number}": weight for number, weight in enumerate(weights)}
        again = {f"second{number}": weight.detach() for number, weight in enumerate(weights)}
        return self.checkpointer.save(step, {**names, **again}).num_bytes

    def ask_to_stop(self, step: int) -> None:
        """Request the cancellation of a save, and return when the uploader has the request."""
        cancel: Any = self.handles[step]._cancel
        cancel()
        assert self.checkpointer is not None
        self.checkpointer.steps()  # runs on the uploader's loop, after the request

    def cancel(self, step: int) -> bool:
        return self.handles[step].cancel()

    def hasten(self, factor: int) -> None:
        """Make the clock of this rank, which limits its waits for other ranks, run faster."""
        Checkpointer.clock.factor = factor

    def watch(self, deadline_seconds: float) -> None:
        assert self.checkpointer is not None
        self.checkpointer.save_on_signal(deadline_seconds=deadline_seconds)

    def should_save(self, step: int) -> list[bool]:
        assert self.checkpointer is not None
        return [self.checkpointer.should_save(step), self.checkpointer.is_stopping]

    def uploader(self) -> int:
        assert self.checkpointer is not None
        return uploader_of(os.getpid())

    def close(self) -> None:
        assert self.checkpointer is not None
        self.checkpointer.close()


def obey(rank: int, world_size: int, rendezvous: str) -> None:
    """Run one rank: run the commands of standard input until it ends."""
    task = Task(rank, world_size, rendezvous)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            result: Any = [True, getattr(task, name)(**arguments)]
        except Exception as exc:
            result = [False, type(exc).__name__, str(exc)]
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
