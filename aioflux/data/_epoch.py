"""Course: which objects each reader reads in each epoch, from its beginning or from a state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from aioflux.data._resume import MARK, VERSION, Phase, check_state, take_share
from aioflux.data._sharding import Reader, rank_from_environment
from aioflux.data._shuffle import permutation
from aioflux.data._worker_state import Shared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.data._options import Sharing
    from aioflux.data._resume import Progress, Share
    from aioflux.data._source import Objects

__all__ = ["Begun", "Course"]


class Begun(NamedTuple):
    """An epoch that one reader has begun, or goes on with."""

    epoch: int
    """Its number."""
    past: tuple[Phase, ...]
    """How it was read before, by other numbers of readers."""
    reader: Reader
    """Who reads."""
    share: Share
    """What."""
    progress: Progress
    """How far it was then."""

    def has_left(self) -> bool:
        """Tell whether there is anything to read."""
        return next(self.progress.todo(self.share), None) is not None

    def num_left(self) -> int:
        """Return how many objects are to be read, of some of them perhaps not all records."""
        taken = len(self.progress.begun) + len(self.progress.open)
        return taken + max(0, len(self.share.positions) - self.progress.num_taken)


class Course:
    """Orders and shares the objects of each epoch, and knows the state that was loaded.

    Pickles; the copies of workers hear of `set_epoch` in the main process, also while they live.

    Args:
        objects: All objects.
        sharing: How they are ordered and shared.
        has_workers: DataLoader's workers are readers of their own.
    """

    def __init__(self, objects: Objects, sharing: Sharing, *, has_workers: bool) -> None:
        if sharing.shard_by == "bytes":
            objects.sizes([])  # refuses what has none
        self._objects = objects
        self._sharing = sharing
        self._has_workers = has_workers
        self._shared = Shared()
        self._inherited: tuple[int, int] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._num_loads = 0
        self._ordered: tuple[tuple[int, Reader], torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group; it is of the rank that pickled this for it.
        inherited = _group_rank() or self._inherited
        return {**self.__dict__, "_inherited": inherited, "_ordered": None}

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins with the next iteration."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, not {epoch}")
        self._shared.epoch = epoch

    def begin(self) -> Begun:
        """Begin an epoch, or go on with that of a state that was loaded and not used yet.

        Raises:
            RuntimeError: A state was loaded that this worker does not know.
            ValueError: The state cannot be gone on with.
        """
        if get_worker_info() is not None and self._num_loads != self._shared.num_loads:
            raise RuntimeError(
                "a state was loaded after this worker had started, which has the one from before; "
                "load it first, and build the DataLoader then"
            )
        reader = self._reader()
        state = None if self._shared.is_used() else self._resumed
        epoch = self._shared.epoch
        if state is not None and epoch is None:
            epoch = self._shared.epoch = state["epoch"]
        if state is not None and epoch != state["epoch"]:
            if self._begun(reader, state["epoch"], state).has_left():
                raise ValueError(
                    f"a state of epoch {state['epoch']} was loaded, which is not over, and "
                    f"set_epoch({epoch}) called; call set_epoch({state['epoch']}) to go on with it"
                )
            state = None
        return self._begun(reader, epoch or 0, state)

    def use(self) -> None:
        """Note that what was begun is being read: the next iteration is another epoch."""
        self._shared.use()

    def order(self) -> tuple[int, torch.Tensor]:
        """Return which epoch was set, and the positions of this reader in the whole of it."""
        key = self._shared.epoch or 0, self._reader()
        if self._ordered is None or self._ordered[0] != key:
            self._ordered = key, self._begun(key[1], key[0], None).share.positions
        return key[0], self._ordered[1]

    def share_length(self) -> int:
        """Return how many objects this reader reads in a whole epoch."""
        return len(self._begun(self._reader(), self._shared.epoch or 0, None).share.positions)

    def _begun(self, reader: Reader, epoch: int, state: Mapping[str, Any] | None) -> Begun:
        sharing = self._sharing
        phases = () if state is None else tuple(map(Phase.unpack, state["phases"]))
        past, share, progress = take_share(
            self._order(epoch),
            phases,
            reader,
            tail=sharing.tail,
            sizes=self._sizes if sharing.shard_by == "bytes" else None,
        )
        return Begun(epoch, past, reader, share, progress)

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._sharing.shuffle:
            return torch.arange(len(self._objects))
        return permutation(len(self._objects), seed=self._sharing.seed, epoch=epoch)

    def _sizes(self, positions: torch.Tensor) -> list[int]:
        return self._objects.sizes(positions.tolist())

    def _header(self) -> dict[str, Any]:
        sharing = self._sharing
        return {
            "num_objects": len(self._objects),
            "listing": self._objects.checksum(),
            "shuffle": sharing.shuffle,
            "seed": sharing.seed,
            "tail": sharing.tail,
            "shard_by": sharing.shard_by,
        }

    def state(self, begun: Begun | None, progress: Progress | None) -> dict[str, Any]:
        """Return the state of a reader that has begun in this process; of none, what was loaded.

        Raises:
            RuntimeError: Workers read, which only they know of.
        """
        if begun is None or progress is None:
            if get_worker_info() is None and self._shared.is_used_by_any():
                raise RuntimeError(
                    "workers have read, and this process does not know how far; use "
                    "torchdata.stateful_dataloader.StatefulDataLoader and its state_dict()"
                )
            if self._resumed is not None:
                return dict(self._resumed)
            return {MARK: VERSION, "epoch": self._shared.epoch or 0, **self._header(), "phases": []}
        reader = begun.reader
        who = {(reader.rank, reader.worker_id): progress}
        now = Phase(reader.world_size, reader.num_workers, who)
        phases = [phase.pack() for phase in (*begun.past, now)]
        return {MARK: VERSION, "epoch": begun.epoch, **self._header(), "phases": phases}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state with the next iteration of this process, and of each worker it gets.

        Raises:
            ValueError: It is of other objects, or of another order.
        """
        check_state(state, self._header())
        self._resumed = dict(state)
        self._shared.count_load()
        if get_worker_info() is None:
            self._num_loads = self._shared.num_loads

    def rank(self) -> tuple[int, int]:
        """Return the rank and the world_size, as they are known now."""
        rank, world_size = self._sharing.rank, self._sharing.world_size
        if rank is not None and world_size is not None:
            return rank, world_size
        known = _group_rank() or self._inherited
        return known or rank_from_environment(os.environ) or (0, 1)

    def _reader(self) -> Reader:
        rank, world_size = self.rank()
        worker = get_worker_info() if self._has_workers else None
        if worker is None:
            return Reader(rank, world_size)
        return Reader(rank, world_size, worker.id, worker.num_workers)


def _group_rank() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None
