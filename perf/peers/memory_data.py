"""DataLoader by itself: objects that lie in the memory of each worker, and come at once.

What it waits for is torch's own: workers that start, queues, and tensors handed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perf.peers._loading import Datasets, OneByOne, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Work


class _Opener:
    """Gives what reads an object out of memory; it is no lambda, so that it pickles."""

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
    """Make what is read."""
    _DATASETS.prepare(work)


async def stream(work: Work) -> tuple[int, float]:
    """Take it through an epoch."""
    return _DATASETS.epoch(work)
