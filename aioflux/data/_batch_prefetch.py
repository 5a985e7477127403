"""BatchPrefetcher: objects of the next batches, prefetched in a DataLoader worker.

    two batches --constant distance--> all following batches, read as one stream of samples
                                       --> requests are in flight while a batch is processed

DataLoader sends the indices of one batch at a time to a worker. Without prefetch, a worker first
waits for its requests and then processes the batch, with no request in flight. The next batches are
predictable if the distance between batches is constant: between their listing indices without a
shuffle, and between their epoch indices with an `ObjectSampler`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from aioflux.data._store_reader import Samples


def predict_indices(
    previous: Sequence[Sequence[int]], batch: Sequence[int], num_objects: int
) -> array[int] | None:
    """Return the indices of `batch` and of all following batches; None if they are unpredictable.

    The last two batches are compared, or the last three if a batch has one index. In a shuffled
    order, the distances between the indices of two batches are hardly ever all equal.
    """
    num_previous = 2 if len(batch) == 1 else 1
    compared = [*previous[-num_previous:], batch]
    if len(compared) <= num_previous or any(len(indices) != len(batch) for indices in compared):
        return None
    distances = {
        new - old
        for before, after in pairwise(compared)
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
        self, previous: Sequence[Sequence[int]], batch: Sequence[int]
    ) -> array[int] | None:
        """Return the listing indices of a batch and of all following batches in this order.

        None if they are unpredictable.
        """
        before = [self._epoch_indices[list(indices)].tolist() for indices in previous]
        now = self._epoch_indices[list(batch)].tolist()
        following = predict_indices(before, now, len(self._listing_indices))
        return following and array("q", self._listing_indices[following.tolist()].tolist())


class BatchPrefetcher:
    """Reader of the batches of one worker; prefetches the next batches if they are predictable.

    Prefetched samples are dropped if a batch is not read to its end or was not predicted.
    """

    def __init__(self) -> None:
        self._previous: list[list[int]] = []
        self._stream: Samples | None = None
        self._predicted = array("q")
        self._num_read = 0
        """Number of samples that were yielded from the stream."""
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
        """Yield the samples of one batch, or the errors of its objects.

        `open_stream` returns samples of objects, prefetched in order. `order` returns the number of
        the epoch and the listing indices in the order of that epoch.
        """
        if not self._is_predicted(indices):
            self.close()
            predicted = predict_indices(self._previous, indices, num_objects)
            if predicted is None and order is not None:
                predicted = self._predict_by_order(*order(), num_objects, indices)
            if predicted is None:
                self._previous = [*self._previous[-1:], indices]
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
            self._previous = [*self._previous[-1:], indices]
            if not is_whole:
                self.close()

    def _is_predicted(self, indices: list[int]) -> bool:
        """Return whether `indices` are the next indices of the stream."""
        upcoming = self._predicted[self._num_read : self._num_read + len(indices)]
        return self._stream is not None and upcoming == array("q", indices)

    def _predict_by_order(
        self, epoch: int, listing_indices: torch.Tensor, num_objects: int, indices: list[int]
    ) -> array[int] | None:
        if self._order is None or self._order.epoch != epoch:
            self._order = _EpochOrder(epoch, listing_indices, num_objects)
        return self._order.predict_indices(self._previous, indices)

    def close(self) -> None:
        """Cancel the requests in flight, and drop prefetched samples."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
