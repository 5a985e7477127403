"""LoadCounters: counts of loaded objects, in memory that the main process and its workers share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, Final, Self, TypeVar

import torch
from torch.utils.data import get_worker_info

from aioflux._values.stats import format_size

T = TypeVar("T")

_MAX_ROWS: Final = 1024
"""One row for the main process and each of 1,023 workers. Workers with higher ids share these rows;
counts may be lost when two workers change one row at the same time."""
_LAST, _SECONDS, _OBJECTS, _BYTES, _WAITED, _HITS, _RETRIES, _SKIPPED = range(8)
"""Columns of a row. `_LAST` is the monotonic time of the last change."""
_COUNTS: Final = (_OBJECTS, _BYTES, _WAITED, _HITS, _RETRIES, _SKIPPED)
_STATE, _SHARE = 8, 9
"""Columns of the share that a reader reads: its state, and its number of objects."""
_BASES: Final = range(10, 16)
"""Columns with the values of `_COUNTS` at the start of the share."""
_WIDTH: Final = 16
"""Number of columns."""

_IDLE, _READING, _ENDED = range(3)
"""States of a share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStats:
    """Counts of a process and its workers at one moment.

    `+` adds the stats of different ranks: counts and times are summed, but `seconds` is the longer
    time, because ranks run at the same time. `-` returns what was added since earlier stats.
    """

    num_objects: int = 0
    """Objects that were read, including objects from the cache."""
    num_bytes: int = 0
    """Size of these objects in bytes, as stored."""
    seconds: float = 0.0
    """Duration of all iterations in seconds, without the time between them. With several workers,
    the longest of their times."""
    waited_seconds: float = 0.0
    """Time in seconds that consumers waited for the next sample, summed over all workers and
    threads."""
    num_cache_hits: int = 0
    """Objects that were read from the cache."""
    num_retries: int = 0
    """Requests that were repeated, after an error or because their bytes were wrong."""
    num_skipped: int = 0
    """Samples that were skipped after an error, with `on_error`."""
    worker_seconds: float = 0.0
    """Duration of all iterations in seconds, summed over all workers."""
    loop_seconds: float = 0.0
    """Duration of the loops over batches of a `loader`, in seconds."""
    loop_waited_seconds: float = 0.0
    """Time in seconds that these loops waited for the next batch."""

    @property
    def objects_per_second(self) -> float:
        """Objects per second; 0 if no time has passed."""
        return self.num_objects / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second; 0 if no time has passed."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @property
    def waited_share(self) -> float:
        """Share of the time that the training waited for data, from 0 to 1.

        The time of `next` on a `loader`; without a `loader`, of workers that waited for objects.
        """
        if self.loop_seconds:
            return self.loop_waited_seconds / self.loop_seconds
        return min(1.0, self.waited_seconds / self.worker_seconds) if self.worker_seconds else 0.0

    def __add__(self, other: LoadStats) -> LoadStats:
        if not isinstance(other, LoadStats):
            return NotImplemented
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        return LoadStats(**sums | {"seconds": max(self.seconds, other.seconds)})

    def __sub__(self, other: LoadStats) -> LoadStats:
        values = asdict(self).items()
        return LoadStats(**{name: value - getattr(other, name) for name, value in values})

    def as_dict(self) -> dict[str, float]:
        """Return the numbers, rates and the share as a flat dict, for loggers of metrics."""
        names = ("objects_per_second", "bytes_per_second", "waited_share")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return the numbers in three lines, for people."""
        size, rate = format_size(self.num_bytes), format_size(self.bytes_per_second)
        return (
            f"read        {self.num_objects:,} objects, {size}, in {self.seconds:.1f} s "
            f"({self.objects_per_second:,.1f}/s, {rate}/s)\n"
            f"waited      {self.waited_share:.0%} of the time\n"
            f"problems    {self.num_retries:,} retries, {self.num_skipped:,} skipped"
        )


class LoadCounters:
    """Counts that the main process and its DataLoader workers share without a lock.

    Each process writes its own row in shared memory. The main process can read the rows of forked
    and spawned workers at any time, also after a worker has exited. A call takes less than a
    microsecond. A pickle for a worker that is being started shares the memory; any other pickle
    starts at zero.
    """

    def __init__(self) -> None:
        # New shared memory contains zeros, so it need not be initialized. `share_memory_` would
        # copy a tensor with OpenMP threads, and hang in a child that was forked after OpenMP
        # threads had run in its parent.
        num_bytes = _MAX_ROWS * _WIDTH * torch.float64.itemsize
        storage: Any = torch.UntypedStorage
        memory = storage._new_shared(num_bytes, device="cpu")  # noqa: SLF001  not public
        self._attach(torch.empty(0, dtype=torch.float64).set_(memory))

    def _attach(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        # Changing an item takes microseconds in a tensor, but 50 nanoseconds in a memoryview.
        values: Any = numbers.numpy()
        self._view: Any = memoryview(values)
        self._counted_retries, self._pid = 0, os.getpid()
        self._loop_seconds = self._loop_waited_seconds = self._loop_left_at = 0.0
        self._epoch_start = LoadStats()

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": None if get_spawning_popen() is None else self._numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["numbers"] is None:
            LoadCounters.__init__(self)
        else:
            self._attach(state["numbers"])

    def start_clock(self) -> Self:
        """Start the clock of an iteration; the time since the last iteration is not counted."""
        self._view[_row() + _LAST] = time.monotonic()
        return self

    def count(
        self,
        num_objects: int,
        num_bytes: int,
        *,
        num_cache_hits: int = 0,
        waited_since: float | None = None,
    ) -> None:
        """Count objects that were read, and the time that the consumer waited for them."""
        view, row, now = self._view, _row(), time.monotonic()
        self._advance_clock(row, now)
        if waited_since is not None:
            view[row + _WAITED] += now - waited_since
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
        """Add the time from `since`, a monotonic time, until now to `waited_seconds`."""
        row, now = _row(), time.monotonic()
        self._advance_clock(row, now)
        self._view[row + _WAITED] += now - since

    def count_skipped(self) -> None:
        """Count a sample that was skipped."""
        self._view[_row() + _SKIPPED] += 1

    def update_retries(self, num_retries: int) -> None:
        """Count the retries since the last call.

        Args:
            num_retries: Sum of `StoreStats.num_retries` and `num_checksum_mismatches` over all
                stores of this process.
        """
        if self._pid != os.getpid():
            # The stores of a forked child count from zero.
            self._counted_retries, self._pid = 0, os.getpid()
        row = _row()
        self._advance_clock(row, time.monotonic())
        self._view[row + _RETRIES] += num_retries - self._counted_retries
        self._counted_retries = num_retries

    def snapshot(self) -> LoadStats:
        """Return the counts of all processes."""
        table = self._numbers.view(_MAX_ROWS, _WIDTH)
        sums = table.sum(dim=0).tolist()
        return _stats(
            [sums[column] for column in _COUNTS],
            float(table[:, _SECONDS].max()),
            worker_seconds=sums[_SECONDS],
            loop_seconds=self._loop_seconds,
            loop_waited_seconds=self._loop_waited_seconds,
        )

    def start_epoch(self) -> None:
        """Start an epoch, before the first of its objects is read."""
        self._epoch_start, self._loop_left_at = self.snapshot(), 0.0

    def epoch_snapshot(self) -> LoadStats:
        """Return the counts of all processes since the last `start_epoch` in this process."""
        return self.snapshot() - self._epoch_start

    def next_batch(self, batches: Iterator[T]) -> T:
        """Return the next batch, and count the time for which the loop over batches waits."""
        since = time.monotonic()
        if self._loop_left_at:
            self._loop_seconds += since - self._loop_left_at
        try:
            return next(batches)
        finally:
            self._loop_left_at = time.monotonic()
            self._loop_waited_seconds += self._loop_left_at - since
            self._loop_seconds += self._loop_left_at - since

    # Progress of the shares of all workers, for the progress line of a rank.

    def start_share(self, num_objects: int) -> None:
        """Start a share of `num_objects` for this worker, or this process if it has no workers."""
        view, row = self._view, _row()
        for base, column in zip(_BASES, _COUNTS, strict=True):
            view[row + base] = view[row + column]
        view[row + _SHARE] = num_objects
        view[row + _STATE] = _READING

    def end_share(self, num_workers: int) -> bool:
        """End the share of this worker; return whether the shares of all workers have ended."""
        self._view[_row() + _STATE] = _ENDED
        return all(self._view[row + _STATE] == _ENDED for row in _rows(num_workers))

    def clear_shares(self, num_workers: int) -> None:
        """Reset the shares of all workers before the next epoch."""
        for row in _rows(num_workers):
            self._view[row + _STATE] = _IDLE

    def is_first_reading(self, num_workers: int) -> bool:
        """Return whether this worker has the lowest id of all workers that are reading a share."""
        reading = (row for row in _rows(num_workers) if self._view[row + _STATE] == _READING)
        return next(reading, None) == _row()

    def shares(self, num_workers: int) -> tuple[LoadStats, int]:
        """Return the counts since the start of the shares, and the number of their objects.

        The share of a worker that has not started counts as large as the share of this worker.
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


def _stats(counts: Sequence[float], seconds: float, **others: Any) -> LoadStats:
    objects, num_bytes, waited, hits, retries, skipped = counts
    return LoadStats(
        num_objects=round(objects),
        num_bytes=round(num_bytes),
        seconds=seconds,
        waited_seconds=waited,
        num_cache_hits=round(hits),
        num_retries=round(retries),
        num_skipped=round(skipped),
        **others,
    )


def _rows(num_workers: int) -> range:
    """Return the offsets of the workers' rows; in the main process, of its own row."""
    if get_worker_info() is None:
        return range(0, _WIDTH, _WIDTH)
    return range(_WIDTH, min(num_workers + 1, _MAX_ROWS) * _WIDTH, _WIDTH)


def _row() -> int:
    worker = get_worker_info()
    return 0 if worker is None else (worker.id + 1) % _MAX_ROWS * _WIDTH
