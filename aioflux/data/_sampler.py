"""ObjectSampler: which indices of a MapDataset one rank reads, shuffled and resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from aioflux.data._epoch import Begun, Course
from aioflux.data._options import Sharing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aioflux.data._map_dataset import MapDataset
    from aioflux.data._resume import Progress
    from aioflux.data._sharding import ShardBy, Tail

__all__ = ["ObjectSampler"]


class ObjectSampler(Sampler[int]):
    """Shares the objects of a `MapDataset` among ranks, as `IterableDataset` does by itself.

        loader = DataLoader(dataset, batch_size=64, sampler=ObjectSampler(dataset, shuffle=True))

    The ranks need not talk, and go on after a change of their number: its `state_dict`, or that of
    a `StatefulDataLoader` which it is in, goes through `merge_states`.
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
            dataset: What the indices are of.
            shuffle: Whether all objects are permuted, in each epoch anew.
            seed: Of the permutations.
            tail: What becomes of a number of objects that is no multiple of `world_size`, as for
                `IterableDataset`.
            shard_by: Ranks get as many objects, or as many bytes, too.
            rank: Rank of this process, from 0; as for `IterableDataset` where it is None.
            world_size: Number of ranks; goes with `rank`.

        Raises:
            ValueError: `rank` and `world_size` do not go together.
        """
        sharing = Sharing(
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            shard_by=shard_by,
            rank=rank,
            world_size=world_size,
        )
        self._course = Course(dataset._objects, sharing, has_workers=False)  # noqa: SLF001  its own house
        dataset._course = self._course  # noqa: SLF001  its workers know then what comes next
        self._now: tuple[Begun, Progress] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins with the next iteration: it orders the objects anew."""
        self._course.set_epoch(epoch)

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks, as they are known now."""
        return self._course.rank()

    def __len__(self) -> int:
        """Return how many indices a whole epoch gives."""
        return self._course.share_length()

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank."""
        begun = self._course.begin()
        self._now = begun, begun.progress
        return self._indices(*self._now)

    def _indices(self, begun: Begun, progress: Progress) -> Iterator[int]:
        # Not before: DataLoader begins twice where it has workers, and asks the second one only.
        self._course.use()
        for index, _ in list(progress.todo(begun.share)):
            progress.take(index)
            yield int(begun.share.positions[index])

    def state_dict(self) -> dict[str, Any]:
        """Return which indices of the epoch were given out."""
        return self._course.state(*(self._now or (None, None)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next iteration.

        Raises:
            ValueError: It is of other objects, or of another order.
        """
        self._course.load(state)
        self._now = None
