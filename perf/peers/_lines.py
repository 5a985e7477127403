"""Base of the peers that read an epoch of text lines. Imports torch, and no peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Work

__all__ = ["Lines"]


class Lines:
    """Builds datasets of lines and reads their epochs; `prepare` builds before the measured part.

    Args:
        make: Builds the dataset of a work.
        has_batches: Whether the dataset yields batches.
    """

    def __init__(self, make: Callable[[Work], Any], *, has_batches: bool = False) -> None:
        self._make = make
        self._has_batches = has_batches
        self._datasets: dict[Work, Any] = {}

    def prepare(self, work: Work) -> None:
        """Build the dataset."""
        self._datasets[work] = self._make(work)

    def epoch(self, work: Work) -> int:
        """Read an epoch, and return the bytes of all lines, with their newlines."""
        if work not in self._datasets:
            self.prepare(work)
        dataset, num_bytes = self._datasets.pop(work), 0
        size = None if self._has_batches else work.batch_size
        collate = _identity if self._has_batches else None
        for batch in DataLoader(dataset, size, num_workers=work.num_workers, collate_fn=collate):
            num_bytes += sum(map(len, batch)) + len(batch)
        return num_bytes


def _identity(batch: Any) -> Any:
    return batch
