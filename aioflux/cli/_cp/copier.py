"""Copier of objects from a source to a target, in batches and streams.

jobs -> batches -> read_many -> write_many     at most four batches, which are held in memory
                `-> pieces -> writer           at most two large objects, piece by piece

Objects are written to standard output one after the other, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux.cli._cp.local_files import LocalFiles, file_crc32c
from aioflux.cli._cp.objects import StandardStreams, StoreObjects
from aioflux.cli._cp.plan import Batcher, Problem
from aioflux.cli._output import MAX_LINES, print_notice
from aioflux.cli._text import describe, one_line
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from aioflux.cli._cp.local_files import Outcome
    from aioflux.cli._cp.objects import CopySource, CopyTarget
    from aioflux.cli._cp.plan import CopyJob, Entry, JobOrProblem
    from aioflux.cli._output import Report
    from aioflux.cli._progress import CommandProgress

_MAX_BATCHES = 4
_MAX_LARGE = 2
_MAX_READS = 3
"""Largest number of attempts to copy a large object whose bytes do not match their checksum."""


class Copier:
    """Copier of objects from one source to one target; counts copies and reports failures.

    Args:
        source: Reader of the objects.
        target: Writer of the copies.
        progress: Counts of objects and bytes.
        report: Failures.
        moves: Delete each source after its copy was made and verified.
    """

    def __init__(
        self,
        source: CopySource,
        target: CopyTarget,
        progress: CommandProgress,
        report: Report,
        *,
        moves: bool = False,
    ) -> None:
        self._moves = moves
        self._source = source
        self._target = target
        self._progress = progress
        self._report = report
        self._is_ordered = isinstance(target, StandardStreams)
        self._large = asyncio.Semaphore(_MAX_LARGE)
        # With `--no-clobber`, another process may create the target meanwhile: see `open_writer`.
        self._download: Callable[[CopyJob, Callable[[int], object]], Awaitable[None]] | None = None
        if (
            isinstance(source, StoreObjects)
            and isinstance(target, LocalFiles)
            and not target.no_clobber
        ):
            self._download = partial(target.download, source.store)
        # Set if the service can copy, so that nothing is downloaded.
        self._within: StoreObjects | None = None
        if (
            isinstance(source, StoreObjects)
            and isinstance(target, StoreObjects)
            and source.store is target.store
            and not target.attributes
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
        within = self._within
        if within is not None:
            act = within.move_many if self._moves else within.copy_many
            outcomes = await act(batch)
        else:
            bodies = await self._source.read_many(batch)
            outcomes = await self._target.write_many(batch, bodies)
            outcomes = await self._remove_copied(batch, outcomes)
        await asyncio.gather(*map(self._finish, batch, outcomes))

    async def _remove_copied(
        self, batch: Sequence[CopyJob], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """Delete the sources that were copied, if they are moved; return the outcomes."""
        copied = [job for job, outcome in zip(batch, outcomes, strict=True) if outcome is None]
        if not self._moves or not copied:
            return outcomes
        removed = iter(await self._source.remove_many(copied))
        return [next(removed) if outcome is None else outcome for outcome in outcomes]

    async def _stream(self, job: CopyJob) -> None:
        # A standard stream cannot be rewound for another attempt, and a download has its own.
        sides = (self._source, self._target)
        has_stream = any(isinstance(each, StandardStreams) for each in sides)
        max_reads = 1 if has_stream or self._download else _MAX_READS
        async with self._large:
            for attempt in range(max_reads):
                outcome, num_bytes = await self._stream_once(job)
                if attempt == max_reads - 1 or not isinstance(outcome, ChecksumError):
                    break
                self._progress.advance(-num_bytes)
        [outcome] = await self._remove_copied([job], [outcome])
        await self._finish(job, outcome, counted=num_bytes)

    async def _stream_once(self, job: CopyJob) -> tuple[Outcome, int]:
        """Copy a large object; return its outcome and the bytes that the progress has counted."""
        num_bytes = 0

        def advance(count: int) -> None:
            nonlocal num_bytes
            num_bytes += count
            self._progress.advance(count)

        try:
            if self._download is not None:
                await self._download(job, advance)
                return None, num_bytes
            async with (
                self._target.open_writer(job) as writer,
                aclosing(self._source.pieces(job)) as pieces,
            ):
                async for piece in pieces:
                    await writer.write(piece)
                    advance(len(piece))
        except BrokenPipeError:
            raise
        except (StorageError, OSError, ValueError) as exc:
            return exc, num_bytes
        return None, num_bytes

    async def _finish(self, job: CopyJob, outcome: Outcome, *, counted: int = 0) -> None:
        if outcome is None:
            self._progress.finish(job.size, counted=counted)
            return
        self._progress.drop(job.size, counted=counted)
        if isinstance(outcome, FileExistsError):  # AlreadyExistsError, too
            self._progress.num_skipped += 1
            await self._compare(job)
        else:
            self._report.fail(_message(job, outcome))

    async def _compare(self, job: CopyJob) -> None:
        """Print a line if a target that was skipped is known to differ from its source."""
        kept = await self._target.find(job)
        if kept is None or not await _is_other(job, kept):
            return
        self._progress.num_different += 1
        if self._progress.num_different <= MAX_LINES:
            print_notice(f"skipped {one_line(job.source)}: {one_line(job.target)} differs from it")


async def _is_other(job: CopyJob, kept: Entry) -> bool:
    """Return whether the target of a job has other bytes than its source, as far as is known."""
    if kept.size != job.size:
        return True
    sides = (job.read_from, kept.item)
    if any(not isinstance(side, str) and side.crc32c is None for side in sides):
        return False
    first, second = [
        await asyncio.to_thread(file_crc32c, side) if isinstance(side, str) else side.crc32c
        for side in sides
    ]
    return first != second


def _message(job: CopyJob, error: Exception) -> str:
    """Return the message of an error, and add source and target if the error names neither."""
    text = describe(error)
    source, target = one_line(job.source), one_line(job.target)
    return text if source in text or target in text else f"cannot copy {source} to {target}: {text}"
