"""The executor of a copy: batches in parallel, large objects as streams.

jobs -> batches -> read many -> write many     four batches at a time, each in memory whole
                `-> pieces -> sink             two large objects at a time, piece by piece

Standard output takes one after the other, in order.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux.cli._copy_disk import SKIPPED
from aioflux.cli._copy_plan import Batcher, Problem
from aioflux.cli._copy_store import Standard, Stored
from aioflux.cli._report import Report
from aioflux.cli._text import describe, format_count, format_seconds, format_size, one_line
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from aioflux.cli._copy_disk import Outcome
    from aioflux.cli._copy_plan import Job, Work
    from aioflux.cli._copy_store import Goal, Origin

__all__ = ["Copier", "Tally"]

_MAX_BATCHES = 4
_MAX_LARGE = 2
_MAX_READS = 3
"""As often as a small object is read where its bytes do not match."""


def _nothing() -> None:
    return


@dataclass(slots=True)
class Tally:
    """Counts of what a copy has planned and done; `changed` is called to show them."""

    report: Report = field(default_factory=Report)
    planned_objects: int = 0
    planned_bytes: int = 0
    is_size_known: bool = True
    num_listings: int = 0
    """Listings of what is to be copied that have not ended: more may be planned."""
    num_objects: int = 0
    num_bytes: int = 0
    num_skipped: int = 0
    started: float = field(default_factory=time.monotonic)
    changed: Callable[[], None] = _nothing

    @property
    def progress(self) -> tuple[int, int | None]:
        """Amount done and total, in bytes, or in objects if all of them are empty.

        The total is None if it is unknown, or the listing has not ended.
        """
        if not self.is_size_known or self.num_listings:
            return self.num_bytes, None
        if not self.planned_bytes:
            return self.num_objects, self.planned_objects
        return self.num_bytes, self.planned_bytes

    def plan(self, job: Job) -> None:
        """Count a job that will be done."""
        self.planned_objects += 1
        self.planned_bytes += max(job.size, 0)
        self.is_size_known = self.is_size_known and job.size >= 0

    def advance(self, num_bytes: int) -> None:
        """Count bytes of a large object that were written."""
        self.num_bytes += num_bytes
        self.changed()

    def finish(self, job: Job, outcome: Outcome, *, moved: int) -> None:
        """Count the outcome of a job, of which `advance` has counted `moved` bytes."""
        if outcome is None:
            self.num_objects += 1
            self.num_bytes += max(job.size, 0) - moved if job.size >= 0 else 0
            return
        # What was moved for nothing is no progress, and what will not be moved is not awaited.
        self.num_bytes -= moved
        self.planned_bytes -= max(job.size, 0)
        self.planned_objects -= 1
        if outcome == SKIPPED:
            self.num_skipped += 1
        else:
            assert isinstance(outcome, Exception)
            self.report.fail(_named(job, outcome))

    def summary(self, verb: str) -> str:
        """Return what was done, and its rate, as text."""
        seconds = max(time.monotonic() - self.started, 1e-3)
        rate = f" in {format_seconds(seconds)} ({format_size(self.num_bytes / seconds)}/s)"
        return self._amount(verb) + rate + self._skipped()

    def plan_summary(self) -> str:
        """Return what would be done, as text."""
        return self._amount("would copy") + self._skipped()

    def _amount(self, verb: str) -> str:
        objects = format_count(self.num_objects, "object")
        return f"{verb} {objects}, {format_size(self.num_bytes)}"

    def _skipped(self) -> str:
        return f", {self.num_skipped:,} skipped" if self.num_skipped else ""


def _named(job: Job, error: Exception) -> str:
    """Say a failure; who is to look for it must find both ends in the line."""
    text = describe(error)
    source, target = one_line(job.source), one_line(job.target)
    return text if source in text or target in text else f"cannot copy {source} to {target}: {text}"


class Copier:
    """Copies what one origin has to one goal."""

    def __init__(self, origin: Origin, goal: Goal, tally: Tally) -> None:
        self._origin = origin
        self._goal = goal
        self._tally = tally
        self._is_ordered = isinstance(goal, Standard)
        self._large = asyncio.Semaphore(_MAX_LARGE)
        # Within one bucket the service copies, and no byte passes here.
        self._within: Stored | None = None
        if isinstance(origin, Stored) and isinstance(goal, Stored) and origin.store is goal.store:
            self._within = goal

    async def run(self, works: AsyncGenerator[Work, None]) -> None:
        """Copy everything; what cannot be copied is reported, and does not keep the others."""
        async with aclosing(works), aclosing(self._batches(works)) as batches:
            max_in_flight = 1 if self._is_ordered else _MAX_BATCHES
            done = bounded_map(self._copy, batches, max_in_flight=max_in_flight, ordered=False)
            async with aclosing(done):
                async for _ in done:
                    self._tally.changed()

    async def _batches(
        self, works: AsyncGenerator[Work, None]
    ) -> AsyncGenerator[Sequence[Job], None]:
        batcher = Batcher(self._is_ordered)
        async for work in works:
            if isinstance(work, Problem):
                self._tally.report.fail(work.message)
                continue
            self._tally.plan(work)
            for batch in batcher.add(work):
                yield batch
        self._tally.num_listings = max(0, self._tally.num_listings - 1)
        if rest := batcher.rest():
            yield rest

    async def _copy(self, batch: Sequence[Job]) -> None:
        if self._within is None and batch[0].is_large:
            await self._stream(batch[0])
            return
        if self._within is not None:
            outcomes = await self._within.copy_many(batch)
        else:
            bodies = await self._origin.read_many(batch)
            outcomes = await self._goal.write_many(batch, bodies)
        for job, outcome in zip(batch, outcomes, strict=True):
            self._tally.finish(job, outcome, moved=0)

    async def _stream(self, job: Job) -> None:
        # What went through a stream cannot be taken back, nor read again.
        is_final = isinstance(self._origin, Standard) or isinstance(self._goal, Standard)
        async with self._large:
            outcome, moved = await self._stream_once(job)
            for _ in range(0 if is_final else _MAX_READS - 1):
                if not isinstance(outcome, ChecksumError):
                    break
                self._tally.advance(-moved)
                outcome, moved = await self._stream_once(job)
        self._tally.finish(job, outcome, moved=moved)

    async def _stream_once(self, job: Job) -> tuple[Outcome, int]:
        moved = 0
        try:
            async with self._goal.sink(job) as sink:
                if sink is not None:
                    async with aclosing(self._origin.pieces(job)) as pieces:
                        async for piece in pieces:
                            await sink.write(piece)
                            moved += len(piece)
                            self._tally.advance(len(piece))
        except BrokenPipeError:
            raise
        except (StorageError, OSError, ValueError) as exc:
            return exc, moved
        return (SKIPPED if sink is None or sink.was_skipped else None), moved
