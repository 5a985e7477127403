"""Ranks: small collectives between the ranks of a training run, over a separate gloo group.

A rank that fails must still call the next collective and report its error there, so that no other
rank waits for it. If a process has died, the other ranks wait until the timeout of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from aioflux.errors import AiofluxError, CheckpointError

T = TypeVar("T")


class Ranks:
    """The ranks that save together; only this process if there is no process group.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.world_size: int = dist.get_world_size(group) if group is not None else 1

    @property
    def is_coordinator(self) -> bool:
        """Return whether this is the rank that plans and commits."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group; None for a single process."""
        return self._group

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of the values of all ranks; costs one all-reduce."""
        if self.world_size == 1:
            return list(values)
        received = torch.tensor(values, dtype=torch.int64)
        self._run(lambda: dist.all_reduce(received, op=dist.ReduceOp.MAX, group=self._group))
        return [int(value) for value in received.tolist()]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on the coordinator, and an empty list on other ranks."""
        if self.world_size == 1:
            return [value]
        received: list[Any] | None = [None] * self.world_size if self.is_coordinator else None
        self._run(lambda: dist.gather_object(value, received, group=self._group, group_dst=0))
        return received or []

    def scatter(self, values: Sequence[T]) -> T:
        """Return this rank's element of the coordinator's `values`; other ranks pass any list."""
        if self.world_size == 1:
            return values[0]
        received: list[Any] = [None]
        sent = list(values) if self.is_coordinator else None
        self._run(lambda: dist.scatter_object_list(received, sent, group=self._group, group_src=0))
        value: T = received[0]
        return value

    def broadcast(self, value: T) -> T:
        """Return the coordinator's value on all ranks."""
        if self.world_size == 1:
            return value
        received: list[Any] = [value]
        self._run(lambda: dist.broadcast_object_list(received, group=self._group, group_src=0))
        return received[0]  # type: ignore[no-any-return]

    def on_coordinator(self, call: Callable[[], T]) -> T:
        """Return the result of a call that the coordinator makes, or raise its error on all ranks.

        On several ranks, an error of another package becomes a CheckpointError.
        """
        if self.world_size == 1:
            return call()
        outcome: tuple[T | None, AiofluxError | None] = None, None
        if self.is_coordinator:
            try:
                outcome = call(), None
            except AiofluxError as exc:
                outcome = None, exc
            except Exception as exc:  # an error that cannot be pickled would hang the other ranks
                outcome = None, CheckpointError(f"{type(exc).__name__}: {exc}")
        value, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # the result of `call`

    def _run(self, collective: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            collective()
        except RuntimeError as exc:
            raise CheckpointError(
                f"rank {self.rank} of {self.world_size} received nothing from the other ranks for "
                f"{time.monotonic() - started:.1f} s: a rank died, or did not make the same call "
                f"of the Checkpointer; see the logs of the other ranks ({exc})"
            ) from exc

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def open_ranks(process_group: Any, timeout_seconds: float) -> Ranks:
    """Return the ranks of a process group, or of the default group.

    Every rank of the group must call this. For several ranks, the call creates a gloo group on the
    CPU, which keeps the collectives of saves separate from the collectives of the training.

    Args:
        process_group: The ranks that save together. None means all ranks, or this process alone if
            torch.distributed is not initialised.
        timeout_seconds: Timeout of each collective, in seconds.

    Raises:
        ValueError: `process_group` is given, and torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise ValueError(
                "process_group has no effect before torch.distributed is initialised; call "
                "init_process_group first"
            )
        return Ranks()
    ranks = dist.get_process_group_ranks(process_group) if process_group is not None else None
    if dist.get_world_size(process_group) == 1:
        return Ranks()
    return Ranks(
        dist.new_group(
            ranks,
            backend="gloo",
            timeout=timedelta(seconds=timeout_seconds),
            use_local_synchronization=ranks is not None,
        )
    )
