"""BatchPrefetcher: objects of the next batches, read before DataLoader asks its worker for them.

    batch, batch --constant distance--> all following batches, as one stream of samples
                                        --> requests are in flight while a batch is processed

DataLoader gives a worker one batch of indices at a time. Without prefetch each batch starts with a
round of latency in which nothing is processed, and ends with processing while no request is in
flight. The next batches are predictable if they follow each other at a constant distance, as they
do without a shuffle, or in the order of an `ObjectSampler`.
"""

from __future__ import annotations

from array import array
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioflux.data._store_reader import Samples

__all__ = ["BatchPrefetcher", "predict_indices"]


def predict_indices(
    past: Sequence[Sequence[int]], batch: Sequence[int], num_objects: int
) -> array[int] | None:
    """Return the indices of a batch and of all that follow it; None if they are unpredictable.

    Two batches are enough, or three of one index each: in a shuffled order, hardly ever two batches
    have the same distance in all their indices.
    """
    num_past = 2 if len(batch) == 1 else 1
    seen = [*past[-num_past:], batch]
    if len(seen) <= num_past or any(len(each) != len(batch) for each in seen):
        return None
    distances = {
        new - old
        for before, after in pairwise(seen)
        for old, new in zip(before, after, strict=True)
    }
    distance = distances.pop() if distances else 0
    if distances or distance <= 0:
        return None
    following = array("q", batch)
    for shift in range(distance, num_objects - min(batch), distance):
        following.extend(index + shift for index in batch if index + shift < num_objects)
    return following


class _EpochOrder:
    """The order of one epoch: listing_index by epoch_index, and the reverse."""

    def __init__(self, epoch: int, listing_indices: torch.Tensor, num_objects: int) -> None:
        self.epoch = epoch
        self._listing_indices = listing_indices
        self._epoch_indices = torch.full((num_objects,), -1)
        self._epoch_indices[listing_indices] = torch.arange(len(listing_indices))

    def predict_indices(
        self, past: Sequence[Sequence[int]], batch: Sequence[int]
    ) -> array[int] | None:
        """Return the listing indices of a batch and of all that follow it in this order."""
        before = [self._epoch_indices[list(each)].tolist() for each in past]
        now = self._epoch_indices[list(batch)].tolist()
        following = predict_indices(before, now, len(self._listing_indices))
        return following and array("q", self._listing_indices[following.tolist()].tolist())


class BatchPrefetcher:
    """Reads the batches of one worker, and prefetches predictable ones.

    Prefetched samples are dropped if batches end early, or if another batch is read.
    """

    def __init__(self) -> None:
        self._past: list[list[int]] = []
        self._stream: Samples | None = None
        self._predicted = array("q")
        self._num_read = 0
        """Samples of the stream that were used."""
        self._order: _EpochOrder | None = None

    def __reduce__(self) -> tuple[type[BatchPrefetcher], tuple[()]]:
        return BatchPrefetcher, ()

    def read(
        self,
        indices: list[int],
        num_objects: int,
        open_stream: Callable[[Sequence[int]], Samples],
        order: Callable[[], tuple[int, torch.Tensor]] | None = None,
    ) -> Samples:
        """Yield the samples of one batch, or the errors of objects.

        `open_stream` prefetches objects in order. `order` returns the number
        of the epoch and its listing indices in the order in which they may be read, always the same
        for one number.
        """
        if not self._is_predicted(indices):
            self.close()
            predicted = predict_indices(self._past, indices, num_objects)
            if predicted is None and order is not None:
                predicted = self._predict_by_order(*order(), num_objects, indices)
            if predicted is None:
                self._past = [*self._past[-1:], indices]
                with closing(open_stream(indices)) as samples:
                    yield from samples
                return
            self._stream, self._predicted, self._num_read = open_stream(predicted), predicted, 0
        stream = self._stream
        assert stream is not None
        is_whole = False
        try:
            for _ in indices:
                yield next(stream)
            is_whole = True
        finally:
            self._num_read += len(indices)
            self._past = [*self._past[-1:], indices]
            if not is_whole:
                self.close()

    def _is_predicted(self, indices: list[int]) -> bool:
        """Return whether these are the next indices of the stream."""
        upcoming = self._predicted[self._num_read : self._num_read + len(indices)]
        return self._stream is not None and upcoming == array("q", indices)

    def _predict_by_order(
        self, epoch: int, listing_indices: torch.Tensor, num_objects: int, indices: list[int]
    ) -> array[int] | None:
        if self._order is None or self._order.epoch != epoch:
            self._order = _EpochOrder(epoch, listing_indices, num_objects)
        return self._order.predict_indices(self._past, indices)

    def close(self) -> None:
        """End the requests that are in flight."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
