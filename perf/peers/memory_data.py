"""A dataset in the memory of each worker, to measure DataLoader itself.

Its consumer waits only for torch: start of the workers, queues, and transfer of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from perf.peers._loading import Datasets, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.work import Work


class _Objects(IterableDataset[Any]):
    """Items of the same bytes; each worker has its share of them."""

    def __init__(self, work: Work) -> None:
        self._data, self._item = bytes(work.size_bytes), decode(work)
        self._count = work.num_objects

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self._item(self._data) for _ in range(first, self._count, step))


_DATASETS = Datasets(_Objects)
prepare = _DATASETS.prepare
stream = _DATASETS.epoch
