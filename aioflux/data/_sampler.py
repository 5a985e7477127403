"""ObjectSampler: the indices of a MapDataset that one rank reads, shuffled and resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from aioflux.data._epoch import EpochPlan, EpochPlanner
from aioflux.data._options import ShardingConfig

if TYPE_CHECKING:
    from aioflux.data._map_dataset import MapDataset
    from aioflux.data._resume import ShareProgress
    from aioflux.data._sharding import ShardBy, Tail


class ObjectSampler(Sampler[int]):
    """Sampler that shares the objects of a `MapDataset` among ranks, like `IterableDataset`.

        loader = DataLoader(dataset, batch_size=64, sampler=ObjectSampler(dataset, shuffle=True))

    The ranks do not communicate. To resume an epoch with another number of ranks, pass the states
    of all ranks to `merge_states`; a `StatefulDataLoader` saves the state of its sampler.
    """

    def __init__(
        self,
        dataset: MapDataset[Any],
        *,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "pad",
        shard_by: ShardBy = "count",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Share the objects of `dataset`.

        Args:
            dataset: Dataset whose indices are yielded.
            shuffle: Whether all objects are permuted, differently in each epoch.
            seed: Seed of the permutations.
            tail: Treatment of the last objects if they do not divide evenly among the ranks, as in
                `IterableDataset`.
            shard_by: "bytes" also gives every rank about the same number of bytes.
            rank: Rank of this process, from 0; by default determined as in `IterableDataset`.
            world_size: Number of ranks; required with `rank`.

        Raises:
            ValueError: Only one of `rank` and `world_size` is given, or they contradict each other.
        """
        sharding = ShardingConfig(
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            shard_by=shard_by,
            rank=rank,
            world_size=world_size,
        )
        source = dataset._source  # noqa: SLF001  of the same package
        self._planner = EpochPlanner(source, sharding, has_workers=False)
        dataset._planner = self._planner  # noqa: SLF001  its workers prefetch in this order
        self._current: tuple[EpochPlan, ShareProgress] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which changes the order of the objects."""
        self._planner.set_epoch(epoch)

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks."""
        return self._planner.rank()

    def __len__(self) -> int:
        """Return the number of indices that this rank yields in a whole epoch."""
        return self._planner.share_length()

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank."""
        plan = self._planner.plan()
        self._current = plan, plan.progress
        return self._indices(plan)

    def _start_epoch(self) -> tuple[list[int], Callable[[int], None]]:
        """Plan an iteration; return its listing indices, and a function that sets their progress.

        The function is called with the number of indices that were read.
        """
        plan = self._planner.plan()
        self._planner.mark_started()
        current = self._current = plan, plan.progress
        share_indices = [index for index, _ in plan.progress.remaining(plan.share)]
        num_marked = 0

        def mark_read(num_read: int) -> None:
            nonlocal num_marked
            if self._current is current:  # no state was loaded since
                for share_index in share_indices[num_marked:num_read]:
                    plan.progress.mark_started(share_index)
                num_marked = num_read

        return plan.share.listing_indices[share_indices].tolist(), mark_read

    def _indices(self, plan: EpochPlan) -> Iterator[int]:
        # Not in `__iter__`: with workers, DataLoader creates two iterators and uses the second.
        self._planner.mark_started()
        for share_index, _ in list(plan.progress.remaining(plan.share)):
            plan.progress.mark_started(share_index)
            yield int(plan.share.listing_indices[share_index])

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in the epoch: the indices that were yielded."""
        return self._planner.state(*(self._current or (None, None)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration.

        Raises:
            ValueError: The state was saved for other objects or another order.
        """
        self._planner.load(state)
        self._current = None
