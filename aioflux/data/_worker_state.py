"""WorkerState: numbers that the main process and its DataLoader workers share."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.data import get_worker_info

__all__ = ["WorkerState"]

_MAX_WORKERS: Final = 1024
_EPOCH, _LOADS, _ITERATION = 0, 1, 2
_STARTED = 3
"""Offset of the flags of the main process and the workers: whether each has started to read."""
_UNSET = -1
_MAIN = -2
"""Identifies iterations in the main process; those of a DataLoader are identified by its seed."""


class WorkerState:
    """Epoch, number of loaded states, and which processes have started to read.

    Persistent workers have copies of the dataset: they learn of `set_epoch` through shared memory.
    Each worker writes a flag of its own, so that nothing is locked. A pickle outside the start of a
    worker carries the numbers, and does not share them.
    """

    def __init__(self) -> None:
        numbers = torch.zeros(_STARTED + _MAX_WORKERS, dtype=torch.int64)
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
        """Number of states loaded in the main process."""
        return int(self._numbers[_LOADS])

    def count_load(self) -> None:
        """Note that a state was loaded, for this worker or, in the main process, for all."""
        self._numbers[_ITERATION] = _UNSET
        if get_worker_info() is not None:
            self._numbers[_own_flag()] = 0
            return
        self._numbers[_LOADS] += 1
        self._numbers[_STARTED:] = 0

    def mark_started(self) -> None:
        """Note that this worker, or the main process, has started to read."""
        if int(self._numbers[_ITERATION]) == _UNSET:
            self._numbers[_ITERATION] = _iteration()
        self._numbers[_own_flag()] = 1

    def has_used_state(self) -> bool:
        """Return whether the state that was loaded last is used up for this process.

        It is if this process has started to read, or any has in another iteration of a DataLoader:
        that was the epoch of the state, with any number of workers.
        """
        iteration = int(self._numbers[_ITERATION])
        return bool(self._numbers[_own_flag()]) or iteration not in {_UNSET, _iteration()}

    def has_any_started(self) -> bool:
        """Return whether any process has started to read since the last load."""
        return bool(self._numbers[_STARTED:].any())


def _in_shared_memory(numbers: torch.Tensor) -> torch.Tensor:
    numbers.share_memory_()  # type: ignore[no-untyped-call]
    return numbers


def _iteration() -> int:
    """Return a number that the workers of one iteration of a DataLoader have in common."""
    worker = get_worker_info()
    return _MAIN if worker is None else int(worker.seed) - int(worker.id)


def _own_flag() -> int:
    worker = get_worker_info()
    if worker is None:
        return _STARTED
    if worker.id + 1 >= _MAX_WORKERS:
        raise ValueError(f"a rank may have {_MAX_WORKERS - 1} workers at most")
    return _STARTED + int(worker.id) + 1
