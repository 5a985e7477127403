"""What adapters share that take lines of shards through an epoch. Imports torch, and no peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Work

__all__ = ["Lines"]


class Lines:
    """Makes datasets of lines, before the clock starts where there is time.

    Args:
        make: Builds the dataset of some work.
        has_batches: Whether it makes batches by itself.
    """

    def __init__(self, make: Callable[[Work], Any], *, has_batches: bool = False) -> None:
        self._make = make
        self._has_batches = has_batches
        self._made: dict[Work, Any] = {}

    def prepare(self, work: Work) -> None:
        """Build the dataset."""
        self._made[work] = self._make(work)

    def epoch(self, work: Work) -> int:
        """Take it through an epoch, and return the bytes of all lines, their ends among them."""
        if work not in self._made:
            self.prepare(work)
        dataset, num_bytes = self._made.pop(work), 0
        size = None if self._has_batches else work.batch_size
        collate = _as_it_is if self._has_batches else None
        for batch in DataLoader(dataset, size, num_workers=work.num_workers, collate_fn=collate):
            num_bytes += sum(map(len, batch)) + len(batch)
        return num_bytes


def _as_it_is(batch: Any) -> Any:
    return batch
