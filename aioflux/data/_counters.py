"""LoadCounters: progress of loading, counted by the main process and its workers together."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LoadCounters", "LoadStats"]

_MAX_ROWS: Final = 1024
"""The main process and 1,023 workers; those beyond share rows, and may lose counts to each other.
"""
_LAST, _SECONDS, _OBJECTS, _BYTES, _WAITED, _HITS, _RETRIES, _SKIPPED = range(8)
_COUNTS: Final = (_OBJECTS, _BYTES, _WAITED, _HITS, _RETRIES, _SKIPPED)
_STATE, _SHARE = 8, 9
_BASES: Final = range(10, 16)
"""The counts of `_COUNTS` when the share was started."""
_WIDTH: Final = 16

_IDLE, _READING, _ENDED = range(3)
"""States of a share whose progress is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStats:
    """Counts of all workers of one process, at one moment.

    Those of several ranks add up by `+`: counts and waits are sums, and `seconds` is the longer
    one, since both ran at the same time.
    """

    num_objects: int = 0
    """Objects that were read, including those from the cache."""
    num_bytes: int = 0
    """Bytes of these, as stored."""
    seconds: float = 0.0
    """Time from the start of each iteration to its end, in seconds, without the time between
    iterations. Of several workers, the longest."""
    waited_seconds: float = 0.0
    """Part of it that consumers waited for samples, in seconds; a sum over workers and threads,
    which consume what they read themselves."""
    num_cache_hits: int = 0
    """Objects that came from the cache."""
    num_retries: int = 0
    """Requests that repeated an earlier one."""
    num_skipped: int = 0
    """Samples that were skipped because of an error, as `on_error` allowed."""

    @property
    def objects_per_second(self) -> float:
        """Objects per second; 0 if no time has passed."""
        return self.num_objects / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second; 0 if no time has passed."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    def __add__(self, other: LoadStats) -> LoadStats:
        if not isinstance(other, LoadStats):
            return NotImplemented
        return LoadStats(
            num_objects=self.num_objects + other.num_objects,
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=max(self.seconds, other.seconds),
            waited_seconds=self.waited_seconds + other.waited_seconds,
            num_cache_hits=self.num_cache_hits + other.num_cache_hits,
            num_retries=self.num_retries + other.num_retries,
            num_skipped=self.num_skipped + other.num_skipped,
        )


class LoadCounters:
    """Counts that the main process and its DataLoader workers share, without a lock.

    Each writes a row of its own in shared memory, so that the dataset in the main process knows the
    counts of its workers, forked or spawned, while they read and after they have ended. One call
    costs less than a microsecond. A pickle outside the start of a worker starts at zero.
    """

    def __init__(self) -> None:
        # The kernel zeroes it. `share_memory_` would copy it by OpenMP threads, and so hang in a
        # process that was forked from one in which these had run.
        num_bytes = _MAX_ROWS * _WIDTH * torch.float64.itemsize
        storage: Any = torch.UntypedStorage
        memory = storage._new_shared(num_bytes, device="cpu")  # noqa: SLF001  not public
        self._attach(torch.empty(0, dtype=torch.float64).set_(memory))

    def _attach(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        # An item of a tensor takes microseconds to change, one of a memoryview 50 nanoseconds.
        values: Any = numbers.numpy()
        self._view: Any = memoryview(values)
        self._counted_retries, self._pid = 0, os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": None if get_spawning_popen() is None else self._numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["numbers"] is None:
            LoadCounters.__init__(self)
        else:
            self._attach(state["numbers"])

    def start_clock(self) -> Self:
        """Start an iteration; the time since the last one is not counted."""
        self._view[_row() + _LAST] = time.monotonic()
        return self

    def count(self, num_objects: int, num_bytes: int, *, num_cache_hits: int = 0) -> None:
        """Count objects that were read."""
        view, row = self._view, _row()
        self._advance_clock(row, time.monotonic())
        view[row + _OBJECTS] += num_objects
        view[row + _BYTES] += num_bytes
        if num_cache_hits:
            view[row + _HITS] += num_cache_hits

    def _advance_clock(self, row: int, now: float) -> None:
        view = self._view
        last = view[row + _LAST]
        if last:
            view[row + _SECONDS] += now - last
        view[row + _LAST] = now

    def count_wait(self, since: float) -> None:
        """Count the time since `since`, of the monotonic clock, as waited by the consumer."""
        row, now = _row(), time.monotonic()
        self._advance_clock(row, now)
        self._view[row + _WAITED] += now - since

    def count_skipped(self) -> None:
        """Count a sample that was skipped."""
        self._view[_row() + _SKIPPED] += 1

    def update_retries(self, num_retries: int) -> None:
        """Count by how many `StoreStats.num_retries` has risen since the last call here.

        Args:
            num_retries: The sum over all stores that are read from, in this process.
        """
        if self._pid != os.getpid():
            # In a forked child the stores start at zero again.
            self._counted_retries, self._pid = 0, os.getpid()
        row = _row()
        self._advance_clock(row, time.monotonic())
        self._view[row + _RETRIES] += num_retries - self._counted_retries
        self._counted_retries = num_retries

    def snapshot(self) -> LoadStats:
        """Return the counts of all processes."""
        table = self._numbers.view(_MAX_ROWS, _WIDTH)
        sums = table.sum(dim=0).tolist()
        return _stats([sums[column] for column in _COUNTS], float(table[:, _SECONDS].max()))

    # Shares whose progress is shown on one line, by one of the workers that read them.

    def start_share(self, num_objects: int) -> None:
        """Note that this worker, or this process without workers, starts its share of an epoch."""
        view, row = self._view, _row()
        for base, column in zip(_BASES, _COUNTS, strict=True):
            view[row + base] = view[row + column]
        view[row + _SHARE] = num_objects
        view[row + _STATE] = _READING

    def end_share(self, num_workers: int) -> bool:
        """Note that the share is read, and return whether those of all workers are."""
        self._view[_row() + _STATE] = _ENDED
        return all(self._view[row + _STATE] == _ENDED for row in _rows(num_workers))

    def clear_shares(self, num_workers: int) -> None:
        """Forget the shares of all workers, which are read: the next epoch starts from 0."""
        for row in _rows(num_workers):
            self._view[row + _STATE] = _IDLE

    def is_first_reading(self, num_workers: int) -> bool:
        """Return whether this is the first of the workers that still read."""
        reading = (row for row in _rows(num_workers) if self._view[row + _STATE] == _READING)
        return next(reading, None) == _row()

    def shares(self, num_workers: int) -> tuple[LoadStats, int]:
        """Return the counts since the shares were started, and how many objects these have.

        Shares of workers that have not started are assumed to be as large as this one.
        """
        view, own_size = self._view, self._view[_row() + _SHARE]
        sums, total = [0.0] * len(_COUNTS), 0.0
        for row in _rows(num_workers):
            if view[row + _STATE] == _IDLE:
                total += own_size
                continue
            total += view[row + _SHARE]
            for number, (base, column) in enumerate(zip(_BASES, _COUNTS, strict=True)):
                sums[number] += view[row + column] - view[row + base]
        return _stats(sums, 0.0), round(total)


def _stats(counts: Sequence[float], seconds: float) -> LoadStats:
    objects, num_bytes, waited, hits, retries, skipped = counts
    return LoadStats(
        num_objects=round(objects),
        num_bytes=round(num_bytes),
        seconds=seconds,
        waited_seconds=waited,
        num_cache_hits=round(hits),
        num_retries=round(retries),
        num_skipped=round(skipped),
    )


def _rows(num_workers: int) -> range:
    """Return the offsets of the rows of the workers, or of the main process."""
    if get_worker_info() is None:
        return range(0, _WIDTH, _WIDTH)
    return range(_WIDTH, min(num_workers + 1, _MAX_ROWS) * _WIDTH, _WIDTH)


def _row() -> int:
    worker = get_worker_info()
    return 0 if worker is None else (worker.id + 1) % _MAX_ROWS * _WIDTH
