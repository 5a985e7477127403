"""Meter: what loading has done so far, counted by the main process and its workers together."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import torch
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["LoadStats", "Meter"]

T = TypeVar("T")

_MAX_PLACES: Final = 1024
"""The main process and 1,023 workers; those beyond share places, and may lose counts to each other.
"""
_LAST, _SECONDS, _OBJECTS, _BYTES, _WAITED, _HITS, _RETRIES, _SKIPPED = range(8)
_COUNTS: Final = (_OBJECTS, _BYTES, _WAITED, _HITS, _RETRIES, _SKIPPED)
_STATE, _SHARE = 8, 9
_BASES: Final = range(10, 16)
"""The counts of `_COUNTS` as they were when the share was begun."""
_WIDTH: Final = 16

_IDLE, _READING, _ENDED = range(3)
"""States of a share whose progress is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStats:
    """What loading has done so far, in all workers of one process; one moment's copy.

    Two add up by `+`, as of the ranks of a job: counts and waits are sums, and `seconds` is the
    longer one, since both ran at the same time.
    """

    num_objects: int = 0
    """Objects that were read, those from the cache included."""
    num_bytes: int = 0
    """Bytes of these, as stored."""
    seconds: float = 0.0
    """Time in which they were read, from the begin of each iteration to its end, in
    seconds; time between iterations is left out. Of workers, the longest."""
    waited_seconds: float = 0.0
    """Part of it that the consumer waited for samples, in seconds; summed over workers and threads,
    who are the consumers of their own reading."""
    num_cache_hits: int = 0
    """Objects that came from the cache."""
    num_retries: int = 0
    """Requests that repeated an earlier one."""
    num_skipped: int = 0
    """Samples that were left out because of an error, as `on_error` allowed."""

    @property
    def objects_per_second(self) -> float:
        """Objects in a second; 0 where no time has passed."""
        return self.num_objects / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes in a second; 0 where no time has passed."""
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


class Meter:
    """Counts that the main process and its DataLoader workers share, without a lock.

    Each writes a place of its own in shared memory, so that the dataset in the main process tells
    of its workers, forked or spawned, while they read and after they have ended. One call costs
    less than a microsecond. A pickle outside of the start of a worker begins at zero.
    """

    def __init__(self) -> None:
        numbers: Any = torch.zeros(_MAX_PLACES * _WIDTH, dtype=torch.float64)
        self._attach(numbers.share_memory_())

    def _attach(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        # An item of a tensor takes microseconds to change, one of a memoryview 50 nanoseconds.
        values: Any = numbers.numpy()
        self._view: Any = memoryview(values)
        self._retries_seen, self._pid = 0, os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": None if get_spawning_popen() is None else self._numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["numbers"] is None:
            Meter.__init__(self)
        else:
            self._attach(state["numbers"])

    def __repr__(self) -> str:
        return f"<Meter {self.snapshot()}>"

    def begin(self) -> Self:
        """Start the clock of an iteration; time since the last one is not counted."""
        self._view[_place() + _LAST] = time.monotonic()
        return self

    def count(self, num_objects: int, num_bytes: int, *, num_cache_hits: int = 0) -> None:
        """Count objects that were read."""
        view, place = self._view, _place()
        self._run(place, time.monotonic())
        view[place + _OBJECTS] += num_objects
        view[place + _BYTES] += num_bytes
        if num_cache_hits:
            view[place + _HITS] += num_cache_hits

    def _run(self, place: int, now: float) -> None:
        view = self._view
        last = view[place + _LAST]
        if last:
            view[place + _SECONDS] += now - last
        view[place + _LAST] = now

    def count_wait(self, seconds: float) -> None:
        """Count time that the consumer waited."""
        self._view[_place() + _WAITED] += seconds

    def count_skipped(self, num_samples: int = 1) -> None:
        """Count samples that were left out."""
        self._view[_place() + _SKIPPED] += num_samples

    def follow_retries(self, num_retries: int) -> None:
        """Count by how many `StoreStats.num_retries` has risen since the last call here.

        Args:
            num_retries: The sum over all stores that are read from, in this process.
        """
        if self._pid != os.getpid():
            # In a forked child the stores begin at zero again.
            self._retries_seen, self._pid = 0, os.getpid()
        self._view[_place() + _RETRIES] += num_retries - self._retries_seen
        self._retries_seen = num_retries

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, and count the time that each is waited for."""
        iterator = iter(items)
        self.begin()
        while True:
            asked = time.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                now = time.monotonic()
                self._run(_place(), now)
                self.count_wait(now - asked)
            yield item

    def snapshot(self) -> LoadStats:
        """Return what all have counted so far."""
        table = self._numbers.view(_MAX_PLACES, _WIDTH)
        sums = table.sum(dim=0).tolist()
        return _stats([sums[column] for column in _COUNTS], float(table[:, _SECONDS].max()))

    # Shares whose progress is shown on one line, by whichever of the workers that read them.

    def begin_share(self, num_objects: int) -> None:
        """Note that this worker, or this process without workers, begins its share of an epoch."""
        view, place = self._view, _place()
        for base, column in zip(_BASES, _COUNTS, strict=True):
            view[place + base] = view[place + column]
        view[place + _SHARE] = num_objects
        view[place + _STATE] = _READING

    def end_share(self, num_workers: int) -> bool:
        """Note that the share is read, and return whether those of all workers are."""
        self._view[_place() + _STATE] = _ENDED
        return all(self._view[place + _STATE] == _ENDED for place in _places(num_workers))

    def forget_shares(self, num_workers: int) -> None:
        """Forget the shares of all workers, which are read: the next epoch begins anew."""
        for place in _places(num_workers):
            self._view[place + _STATE] = _IDLE

    def is_first_reading(self, num_workers: int) -> bool:
        """Return whether this is the first of the workers that still read."""
        reading = (p for p in _places(num_workers) if self._view[p + _STATE] == _READING)
        return next(reading, None) == _place()

    def shares(self, num_workers: int) -> tuple[LoadStats, int]:
        """Return what was counted since the shares were begun, and how many objects they have.

        Those of workers that have not begun are taken to be as large as this one.
        """
        view, own = self._view, self._view[_place() + _SHARE]
        sums, total = [0.0] * len(_COUNTS), 0.0
        for place in _places(num_workers):
            if view[place + _STATE] == _IDLE:
                total += own
                continue
            total += view[place + _SHARE]
            for at, (base, column) in enumerate(zip(_BASES, _COUNTS, strict=True)):
                sums[at] += view[place + column] - view[place + base]
        return _stats(sums, 0.0), round(total)

    def reset(self) -> None:
        """Set everything to zero; what workers count just then may be lost."""
        self._numbers.zero_()


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


def _places(num_workers: int) -> range:
    """Return the places of so many workers; of this process, where it has none."""
    if get_worker_info() is None:
        return range(0, _WIDTH, _WIDTH)
    return range(_WIDTH, min(num_workers + 1, _MAX_PLACES) * _WIDTH, _WIDTH)


def _place() -> int:
    worker = get_worker_info()
    return 0 if worker is None else (worker.id + 1) % _MAX_PLACES * _WIDTH
