"""A dataset in the memory of each worker, to measure DataLoader itself.

Its consumer waits only for torch: start of the workers, queues, and transfer of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perf.peers._loading import Datasets, OneByOne, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Moved, Work


class _Opener:
    """Returns a function that reads objects from memory. A class, because lambdas do not pickle."""

    def __init__(self, work: Work) -> None:
        self._data = bytes(work.size_bytes)

    def __call__(self) -> Callable[[str], bytes]:
        return self._read

    def _read(self, key: str) -> bytes:
        del key
        return self._data


def _dataset(work: Work) -> Any:
    return OneByOne(list(work.each_key()), _Opener(work), decode(work))


_DATASETS = Datasets(_dataset)


def prepare(work: Work) -> None:
    """Build the dataset."""
    _DATASETS.prepare(work)


async def stream(work: Work) -> Moved:
    """Read an epoch of the dataset."""
    return _DATASETS.epoch(work)
