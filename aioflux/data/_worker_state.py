"""WorkerState: numbers that the main process and its DataLoader workers share."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.data import get_worker_info

_MAX_WORKERS: Final = 1024
_EPOCH, _LOADS, _ITERATION = 0, 1, 2
_STARTED = 3
"""Index of the first flag, which belongs to the main process; the flags of the workers follow. A
flag is 1 after its process has started to read."""
_UNSET = -1
_MAIN = -2
"""Identifier of an iteration in the main process. An iteration with workers is identified by the
seed that DataLoader draws for it."""


class WorkerState:
    """The epoch, the number of loaded states, and a flag for each process that started to read.

    The numbers are in shared memory, so that `set_epoch` in the main process also changes the
    epoch of persistent workers. A process that starts to read sets only its own flag, and needs no
    lock. A pickle for a worker that is being started shares the memory; any other pickle copies the
    numbers.
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
        """The epoch, or None if `set_epoch` was never called and no state was resumed."""
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
        """Mark a state as loaded: in a worker for this worker, in the main process for all."""
        self._numbers[_ITERATION] = _UNSET
        if get_worker_info() is not None:
            self._numbers[_own_flag()] = 0
            return
        self._numbers[_LOADS] += 1
        self._numbers[_STARTED:] = 0

    def mark_started(self) -> None:
        """Mark this process as having started to read."""
        if int(self._numbers[_ITERATION]) == _UNSET:
            self._numbers[_ITERATION] = _iteration()
        self._numbers[_own_flag()] = 1

    def has_used_state(self) -> bool:
        """Return whether the loaded state was used before, so that this process must ignore it.

        The state was used if this process has started to read since the load, or if any process has
        started to read in an earlier iteration of a DataLoader: that iteration resumed the epoch of
        the state, even if it had fewer workers.
        """
        iteration = int(self._numbers[_ITERATION])
        return bool(self._numbers[_own_flag()]) or iteration not in {_UNSET, _iteration()}

    def has_any_started(self) -> bool:
        """Return whether any process has started to read since a state was loaded."""
        return bool(self._numbers[_STARTED:].any())


def _in_shared_memory(numbers: torch.Tensor) -> torch.Tensor:
    numbers.share_memory_()  # type: ignore[no-untyped-call]
    return numbers


def _iteration() -> int:
    """Return the identifier of this iteration, the same in all workers of a DataLoader."""
    worker = get_worker_info()
    return _MAIN if worker is None else int(worker.seed) - int(worker.id)


def _own_flag() -> int:
    worker = get_worker_info()
    if worker is None:
        return _STARTED
    if worker.id + 1 >= _MAX_WORKERS:
        raise ValueError(f"a rank may have {_MAX_WORKERS - 1} workers at most")
    return _STARTED + int(worker.id) + 1
