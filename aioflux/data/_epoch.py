"""EpochPlanner: the share of each reader in each epoch, from the start or from a loaded state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from aioflux.data._resume import STATE_KEY, VERSION, Phase, check_state, plan_share
from aioflux.data._sharding import Reader, rank_from_environment
from aioflux.data._shuffle import permutation
from aioflux.data._worker_state import WorkerState

if TYPE_CHECKING:
    from aioflux.data._options import ShardingConfig
    from aioflux.data._resume import Share, ShareProgress
    from aioflux.data._source import Source


class EpochPlan(NamedTuple):
    """The part of one epoch that one reader reads."""

    epoch: int
    """Number of the epoch."""
    earlier_phases: tuple[Phase, ...]
    """Earlier phases of the epoch. Objects that were read in these are not in the share."""
    reader: Reader
    share: Share
    progress: ShareProgress
    """Progress in the share when the plan was made."""

    def has_remaining(self) -> bool:
        """Return whether any object of the share is unread."""
        return next(self.progress.remaining(self.share), None) is not None

    def num_remaining(self) -> int:
        """Return the number of objects with unread bytes or records."""
        partial = len(self.progress.partial) + len(self.progress.skipped)
        return partial + max(0, len(self.share.listing_indices) - self.progress.num_started)


class EpochPlanner:
    """Planner of epochs: orders objects, shares them among readers, and resumes a loaded state.

    Workers have pickled or forked copies of the planner. `set_epoch` in the main process also
    changes these copies. With `has_workers` each DataLoader worker is a reader. It is False for a
    sampler, which runs in the main process.
    """

    def __init__(self, source: Source, sharding: ShardingConfig, *, has_workers: bool) -> None:
        if sharding.shard_by == "bytes":
            source.sizes([])  # raises ValueError if sizes are unknown
        self._source = source
        self._sharding = sharding
        self._has_workers = has_workers
        self._worker_state = WorkerState()
        self._inherited_rank: tuple[int, int] | None = None
        self._loaded_state: Mapping[str, Any] | None = None
        self._num_loads = 0
        self._cached_order: tuple[tuple[int, Reader], torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group: it inherits the rank of the pickling process.
        inherited = _process_group_rank() or self._inherited_rank
        return {**self.__dict__, "_inherited_rank": inherited, "_cached_order": None}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, not {epoch}")
        self._worker_state.epoch = epoch

    def plan(self) -> EpochPlan:
        """Return the plan of the next iteration: an epoch, or the rest of a resumed epoch.

        Raises:
            RuntimeError: A state was loaded after this worker had started.
            ValueError: The loaded state cannot be resumed.
        """
        worker_state = self._worker_state
        if get_worker_info() is not None and self._num_loads != worker_state.num_loads:
            raise RuntimeError(
                "a state was loaded after this worker had started, and the worker does not have "
                "the state; load the state before you build the DataLoader"
            )
        reader = self._reader()
        state = None if worker_state.has_used_state() else self._loaded_state
        epoch = worker_state.epoch
        if state is not None and epoch is None:
            epoch = worker_state.epoch = state["epoch"]
        if state is not None and epoch != state["epoch"]:
            if self._plan(reader, state["epoch"], state).has_remaining():
                raise ValueError(
                    f"the loaded state is of epoch {state['epoch']}, which is not finished, but "
                    f"set_epoch({epoch}) was called; call set_epoch({state['epoch']}) to resume"
                )
            state = None
        return self._plan(reader, epoch or 0, state)

    def mark_started(self) -> None:
        """Mark the loaded state as used: the next iteration of this process ignores it."""
        self._worker_state.mark_started()

    def order(self) -> tuple[int, torch.Tensor]:
        """Return the epoch, and the listing indices that this reader reads in a whole epoch."""
        key = self._worker_state.epoch or 0, self._reader()
        if self._cached_order is None or self._cached_order[0] != key:
            self._cached_order = key, self._plan(key[1], key[0], None).share.listing_indices
        return key[0], self._cached_order[1]

    def share_length(self) -> int:
        """Return the number of objects that this reader reads in a whole epoch."""
        plan = self._plan(self._reader(), self._worker_state.epoch or 0, None)
        return len(plan.share.listing_indices)

    def _plan(self, reader: Reader, epoch: int, state: Mapping[str, Any] | None) -> EpochPlan:
        sharding = self._sharding
        phases = () if state is None else tuple(map(Phase.unpack, state["phases"]))
        earlier_phases, share, progress = plan_share(
            self._epoch_order(epoch),
            phases,
            reader,
            tail=sharding.tail,
            sizes=self._sizes if sharding.shard_by == "bytes" else None,
        )
        return EpochPlan(epoch, earlier_phases, reader, share, progress)

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        """Return the listing_index of each epoch_index."""
        if not self._sharding.shuffle:
            return torch.arange(len(self._source))
        return permutation(len(self._source), seed=self._sharding.seed, epoch=epoch)

    def _sizes(self, listing_indices: torch.Tensor) -> list[int]:
        return self._source.sizes(listing_indices.tolist())

    def _state_header(self) -> dict[str, Any]:
        sharding = self._sharding
        return {
            "num_objects": len(self._source),
            "listing": self._source.checksum(),
            "shuffle": sharding.shuffle,
            "seed": sharding.seed,
            "tail": sharding.tail,
            "shard_by": sharding.shard_by,
        }

    def state(self, plan: EpochPlan | None, progress: ShareProgress | None) -> dict[str, Any]:
        """Return the state of a reader in this process.

        Args:
            plan: Plan of the current iteration. None before the first one: then the loaded state is
                returned, or the start of the epoch.
            progress: Progress in the share of `plan`.

        Raises:
            RuntimeError: Workers have read, and this process does not have their progress.
        """
        if plan is None or progress is None:
            if get_worker_info() is None and self._worker_state.has_any_started():
                raise RuntimeError(
                    "DataLoader workers have read samples, and this process does not have their "
                    "progress; use torchdata.stateful_dataloader.StatefulDataLoader and its "
                    "state_dict()"
                )
            if self._loaded_state is not None:
                return dict(self._loaded_state)
            epoch, phases = self._worker_state.epoch or 0, []
        else:
            reader = plan.reader
            readers = {(reader.rank, reader.worker_id): progress}
            current = Phase(reader.world_size, reader.num_workers, readers)
            epoch, phases = plan.epoch, [phase.pack() for phase in (*plan.earlier_phases, current)]
        return {STATE_KEY: VERSION, "epoch": epoch, **self._state_header(), "phases": phases}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration, here or in workers that start later.

        Raises:
            ValueError: `state` is not a state, or was saved for other objects or another order.
        """
        check_state(state, self._state_header())
        self._loaded_state = dict(state)
        self._worker_state.count_load()
        if get_worker_info() is None:
            self._num_loads = self._worker_state.num_loads

    def rank(self) -> tuple[int, int]:
        """Return the rank and the world_size; they change when a process group is initialized."""
        rank, world_size = self._sharding.rank, self._sharding.world_size
        if rank is not None and world_size is not None:
            return rank, world_size
        of_group = _process_group_rank() or self._inherited_rank
        return of_group or rank_from_environment(os.environ) or (0, 1)

    def _reader(self) -> Reader:
        rank, world_size = self.rank()
        worker = get_worker_info() if self._has_workers else None
        if worker is None:
            return Reader(rank, world_size)
        return Reader(rank, world_size, worker.id, worker.num_workers)


def _process_group_rank() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None
