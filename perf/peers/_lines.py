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
    """

    def __init__(self, make: Callable[[Work], Any]) -> None:
        self._make = make
        self._made: dict[Work, Any] = {}

    def prepare(self, work: Work) -> None:
        """Build the dataset."""
        self._made[work] = self._make(work)

    def epoch(self, work: Work) -> int:
        """Take it through an epoch, and return the bytes of all lines, their ends among them."""
        if work not in self._made:
            self.prepare(work)
        dataset, num_bytes = self._made.pop(work), 0
        for batch in DataLoader(dataset, batch_size=work.batch_size, num_workers=work.num_workers):
            num_bytes += sum(map(len, batch)) + len(batch)
        return num_bytes
