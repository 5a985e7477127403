"""ReadAhead: what a DataLoader's worker will be asked for next, where its batches tell.

    batch, batch --the same distance--> all that follow, as one stream
                                        --> requests are under way while a batch is worked on

DataLoader hands a worker one batch of indices at a time. Read by itself, each begins with a round
of latency in which nothing is worked on, and ends with work during which nothing is under way.
Where batches follow each other at one distance, as they do without a shuffle, the next ones are
known; and so they are where they do in the order of a sampler of ours.
"""

from __future__ import annotations

from array import array
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from aioflux.data._sample import Sample

    Stream = Generator[tuple[int, Sample | None], None, None]

__all__ = ["ReadAhead", "continued"]


def continued(
    past: Sequence[Sequence[int]], batch: Sequence[int], num_objects: int
) -> array[int] | None:
    """Return the positions of a batch and of all that follow it; None where nothing tells them.

    Two batches tell them, and three where each is of one: of those that were shuffled, hardly ever
    two keep one distance in all their positions.

    Args:
        past: The batches before, the last one last.
        batch: The positions that are asked for now.
        num_objects: Behind all positions.
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
        following.extend(at + shift for at in batch if at + shift < num_objects)
    return following


class _Order:
    """The order of one epoch, and where in it each position is."""

    def __init__(self, epoch: int, positions: torch.Tensor, num_objects: int) -> None:
        self.epoch = epoch
        self._positions = positions
        self._places = torch.full((num_objects,), -1)
        self._places[positions] = torch.arange(len(positions))

    def continued(self, past: Sequence[Sequence[int]], batch: Sequence[int]) -> array[int] | None:
        """Return the positions of a batch and of all that follow it in this order."""
        before = [self._places[list(each)].tolist() for each in past]
        now = self._places[list(batch)].tolist()
        following = continued(before, now, len(self._positions))
        return following and array("q", self._positions[following.tolist()].tolist())


class ReadAhead:
    """Reads the batches of one worker, and ahead of them where it knows the next ones.

    What was read ahead and is not asked for is dropped: that is where the batches end before the
    dataset does.
    """

    def __init__(self) -> None:
        self._past: list[list[int]] = []
        self._stream: Stream | None = None
        self._following = array("q")
        self._at = 0
        self._order: _Order | None = None

    def __reduce__(self) -> tuple[type[ReadAhead], tuple[()]]:
        return ReadAhead, ()

    def read(
        self,
        positions: list[int],
        num_objects: int,
        open_stream: Callable[[Sequence[int]], Stream],
        order: Callable[[], tuple[int, torch.Tensor]] | None = None,
    ) -> Generator[Sample | None, None, None]:
        """Yield the samples at `positions`, or None for what was skipped.

        Args:
            positions: Which ones.
            num_objects: Behind all positions.
            open_stream: Begins to read some positions, in order and ahead of whoever takes them.
            order: Returns the number of the epoch, and all positions in an order that they may have
                in it; always the same for one number.
        """
        if not self._goes_on_with(positions):
            self.close()
            following = continued(self._past, positions, num_objects)
            if following is None and order is not None:
                following = self._along(*order(), num_objects, positions)
            if following is None:
                self._past = [*self._past[-1:], positions]
                with closing(open_stream(positions)) as samples:
                    for _, sample in samples:
                        yield sample
                return
            self._stream, self._following, self._at = open_stream(following), following, 0
        stream = self._stream
        assert stream is not None
        is_whole = False
        try:
            for _ in positions:
                yield next(stream)[1]
            is_whole = True
        finally:
            self._at += len(positions)
            self._past = [*self._past[-1:], positions]
            if not is_whole:
                self.close()

    def _goes_on_with(self, positions: list[int]) -> bool:
        """Tell whether the stream has these positions next."""
        wanted = self._following[self._at : self._at + len(positions)]
        return self._stream is not None and wanted == array("q", positions)

    def _along(
        self, epoch: int, order: torch.Tensor, num_objects: int, positions: list[int]
    ) -> array[int] | None:
        if self._order is None or self._order.epoch != epoch:
            self._order = _Order(epoch, order, num_objects)
        return self._order.continued(self._past, positions)

    def close(self) -> None:
        """End what is under way."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
