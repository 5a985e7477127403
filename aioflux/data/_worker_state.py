"""Numbers that the main process and its workers share: who changes one, tells all."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.data import get_worker_info

__all__ = ["Shared"]

_MAX_WORKERS: Final = 1024
_EPOCH, _LOADS, _ITERATION = 0, 1, 2
_USED = 3
_UNSET = -1
_MAIN = -2
"""Stands for the main process where iterations of DataLoader have their seed."""


class Shared:
    """Epoch, states loaded, and who has begun to read, in shared memory.

    Workers that live on over epochs have copies of the dataset: without this, they would not hear
    of `set_epoch`. What each worker writes has a place of its own, so that nothing is locked. A
    pickle outside of starting a worker carries the numbers, and shares them no more.
    """

    def __init__(self) -> None:
        numbers = torch.zeros(_USED + _MAX_WORKERS, dtype=torch.int64)
        numbers[_EPOCH] = numbers[_ITERATION] = _UNSET
        self._numbers = _in_shared_memory(numbers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._numbers.is_shared():  # type: ignore[no-untyped-call]
            self._numbers = _in_shared_memory(self._numbers.clone())

    @property
    def epoch(self) -> int | None:
        """The epoch that was set, or None."""
        epoch = int(self._numbers[_EPOCH])
        return None if epoch == _UNSET else epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._numbers[_EPOCH] = epoch

    @property
    def num_loads(self) -> int:
        """How often a state was loaded in the main process."""
        return int(self._numbers[_LOADS])

    def count_load(self) -> None:
        """Note that a state was loaded, for this worker or, in the main process, for all."""
        self._numbers[_ITERATION] = _UNSET
        if get_worker_info() is not None:
            self._numbers[_USED + _place()] = 0
            return
        self._numbers[_LOADS] += 1
        self._numbers[_USED : _USED + _MAX_WORKERS] = 0

    def use(self) -> None:
        """Note that this worker, or the main process, has begun to read."""
        if int(self._numbers[_ITERATION]) == _UNSET:
            self._numbers[_ITERATION] = _iteration()
        self._numbers[_USED + _place()] = 1

    def is_used(self) -> bool:
        """Tell whether the state that was loaded last is used up for this worker, or the main one.

        It is where this one has begun to read, and where any has in another iteration of a
        DataLoader: that was the epoch of the state, by however many workers it was read.
        """
        iteration = int(self._numbers[_ITERATION])
        return bool(self._numbers[_USED + _place()]) or iteration not in {_UNSET, _iteration()}

    def is_used_by_any(self) -> bool:
        """Tell whether any has begun to read since the last load."""
        return bool(self._numbers[_USED : _USED + _MAX_WORKERS].any())


def _in_shared_memory(numbers: torch.Tensor) -> torch.Tensor:
    numbers.share_memory_()  # type: ignore[no-untyped-call]
    return numbers


def _iteration() -> int:
    """Return what tells the workers of one iteration of a DataLoader from those of another."""
    worker = get_worker_info()
    return _MAIN if worker is None else int(worker.seed) - int(worker.id)


def _place() -> int:
    worker = get_worker_info()
    if worker is None:
        return 0
    if worker.id + 1 >= _MAX_WORKERS:
        raise ValueError(f"a rank may have {_MAX_WORKERS - 1} workers at most")
    return int(worker.id) + 1
