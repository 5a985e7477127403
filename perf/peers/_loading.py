"""What adapters share that load batches for training. Imports torch, and no peer.

A dataset is built, and so listed, before the clock starts; the epoch is measured, from the start of
the workers to their end. What becomes of an object's bytes is the same for all: their length, or a
tensor.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from perf.work import Work

__all__ = ["Datasets", "OneByOne", "decode", "epoch"]


def _tensor_of(data: Any) -> torch.Tensor:
    # A copy, as any decoder makes one; bytes that may not be written to are no memory of a tensor.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(work: Work) -> Callable[[Any], Any]:
    """Return what makes an item of an object's bytes."""
    return _tensor_of if work.is_whole else len


class Datasets:
    """Makes datasets, before the clock starts where there is time, and takes them through an epoch.

    Args:
        make: Builds the dataset of some work.
    """

    def __init__(self, make: Callable[[Work], Any]) -> None:
        self._make = make
        self._made: dict[Work, Any] = {}

    def prepare(self, work: Work) -> None:
        """Build the dataset."""
        self._made[work] = self._make(work)

    def epoch(self, work: Work) -> tuple[int, float]:
        """Take the dataset of some work through an epoch; it is built now where it was not."""
        if work not in self._made:
            self.prepare(work)
        return epoch(self._made.pop(work), work)


def epoch(dataset: Any, work: Work) -> tuple[int, float]:
    """Load every batch of a dataset; return the bytes of all, and how long their consumer waited.

    Before the first batch it waits for the workers to start, too.
    """
    num_bytes, waited_seconds = 0, 0.0
    begun = time.perf_counter()
    for batch in _loader(dataset, work):
        waited_seconds += time.perf_counter() - begun
        num_bytes += batch.numel() if work.is_whole else int(batch.sum())
        if work.step_seconds:
            time.sleep(work.step_seconds)
        begun = time.perf_counter()
    return num_bytes, waited_seconds


def _loader(dataset: Any, work: Work) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=work.batch_size, num_workers=work.num_workers)


class OneByOne(IterableDataset[Any]):
    """Reads one object after the other, each worker a run of its own: what one writes by hand.

    Args:
        keys: Of all objects.
        open_reader: Called in the worker; returns what reads a key.
        item: Makes an item of an object's bytes.
    """

    def __init__(
        self,
        keys: Sequence[str],
        open_reader: Callable[[], Callable[[str], bytes]],
        item: Callable[[bytes], Any],
    ) -> None:
        self._keys = keys
        self._open_reader = open_reader
        self._item = item

    def __iter__(self) -> Iterator[Any]:
        """Read the share of this worker."""
        read = self._open_reader()
        for key in _share(self._keys):
            yield self._item(read(key))


def _share(keys: Sequence[str]) -> Sequence[str]:
    """Return the keys that the worker reads in which this is called; all where there is none."""
    worker = get_worker_info()
    return keys if worker is None else keys[worker.id :: worker.num_workers]
