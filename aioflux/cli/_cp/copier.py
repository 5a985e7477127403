"""Copier of objects from a source to a target, in batches and streams.

jobs -> batches -> read_many -> write_many     at most four batches, which are held in memory
                `-> pieces -> writer           at most two large objects, piece by piece

Objects are written to standard output one after the other, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux.cli._cp.objects import StandardStreams, StoreObjects
from aioflux.cli._cp.plan import Batcher, Problem
from aioflux.cli._text import describe, one_line
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from aioflux.cli._cp.local_files import Outcome
    from aioflux.cli._cp.objects import CopySource, CopyTarget
    from aioflux.cli._cp.plan import CopyJob, JobOrProblem
    from aioflux.cli._output import Report
    from aioflux.cli._progress import CommandProgress

_MAX_BATCHES = 4
_MAX_LARGE = 2
_MAX_READS = 3
"""Largest number of attempts to copy a large object whose bytes do not match their checksum."""


class Copier:
    """Copier of objects from one source to one target; counts copies and reports failures."""

    def __init__(
        self, source: CopySource, target: CopyTarget, progress: CommandProgress, report: Report
    ) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        self._report = report
        self._is_ordered = isinstance(target, StandardStreams)
        self._large = asyncio.Semaphore(_MAX_LARGE)
        # Set if both are one store: then the service copies, and nothing is downloaded.
        self._within: StoreObjects | None = None
        if (
            isinstance(source, StoreObjects)
            and isinstance(target, StoreObjects)
            and source.store is target.store
        ):
            self._within = target

    async def run(self, jobs: AsyncGenerator[JobOrProblem, None]) -> None:
        """Copy all jobs; report failures, and continue with the other jobs."""
        async with aclosing(jobs), aclosing(self._batches(jobs)) as batches:
            max_in_flight = 1 if self._is_ordered else _MAX_BATCHES
            done = bounded_map(self._copy, batches, max_in_flight=max_in_flight, ordered=False)
            async with aclosing(done):
                async for _ in done:
                    pass

    async def _batches(
        self, jobs: AsyncGenerator[JobOrProblem, None]
    ) -> AsyncGenerator[Sequence[CopyJob], None]:
        batcher = Batcher(self._is_ordered)
        async for job in jobs:
            if isinstance(job, Problem):
                self._report.fail(job.message)
                continue
            self._progress.plan(job.size)
            for batch in batcher.add(job):
                yield batch
        self._progress.num_listings = max(0, self._progress.num_listings - 1)
        if rest := batcher.flush():
            yield rest

    async def _copy(self, batch: Sequence[CopyJob]) -> None:
        if self._within is None and batch[0].is_large:
            await self._stream(batch[0])
            return
        if self._within is not None:
            outcomes = await self._within.copy_many(batch)
        else:
            bodies = await self._source.read_many(batch)
            outcomes = await self._target.write_many(batch, bodies)
        for job, outcome in zip(batch, outcomes, strict=True):
            self._finish(job, outcome)

    async def _stream(self, job: CopyJob) -> None:
        # A standard stream cannot be rewound for another attempt.
        streams = (self._source, self._target)
        max_reads = 1 if any(isinstance(each, StandardStreams) for each in streams) else _MAX_READS
        async with self._large:
            for attempt in range(max_reads):
                outcome, num_bytes = await self._stream_once(job)
                if attempt == max_reads - 1 or not isinstance(outcome, ChecksumError):
                    break
                self._progress.advance(-num_bytes)
        self._finish(job, outcome, counted=num_bytes)

    async def _stream_once(self, job: CopyJob) -> tuple[Outcome, int]:
        """Copy a large object; return its outcome and the bytes that the progress has counted."""
        num_bytes = 0
        try:
            async with (
                self._target.open_writer(job) as writer,
                aclosing(self._source.pieces(job)) as pieces,
            ):
                async for piece in pieces:
                    await writer.write(piece)
                    num_bytes += len(piece)
                    self._progress.advance(len(piece))
        except BrokenPipeError:
            raise
        except (StorageError, OSError, ValueError) as exc:
            return exc, num_bytes
        return None, num_bytes

    def _finish(self, job: CopyJob, outcome: Outcome, *, counted: int = 0) -> None:
        if outcome is None:
            self._progress.finish(job.size, counted=counted)
            return
        self._progress.drop(job.size, counted=counted)
        if isinstance(outcome, FileExistsError):  # AlreadyExistsError, too
            self._progress.num_skipped += 1
        else:
            self._report.fail(_message(job, outcome))


def _message(job: CopyJob, error: Exception) -> str:
    """Return the message of an error, and add source and target if the error names neither."""
    text = describe(error)
    source, target = one_line(job.source), one_line(job.target)
    return text if source in text or target in text else f"cannot copy {source} to {target}: {text}"
