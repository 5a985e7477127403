"""Copier of objects from a source to a target, in batches and streams.

Stores and standard streams are sources and targets here; files are those of `local_files`.

jobs -> batches -> read_many -> write_many     at most four batches, which are held in memory
                `-> pieces -> writer           at most two large objects, piece by piece

Objects are written to standard output one after the other, in order.
"""

from __future__ import annotations

import asyncio
import mimetypes
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioflux._concurrency.fan_out import bounded_map
from aioflux._local_files import FileChangedError
from aioflux._values.meta import ObjectMeta, portable_attributes
from aioflux.cli._arguments import find
from aioflux.cli._cp.local_files import LocalFiles, file_crc32c
from aioflux.cli._cp.plan import Batcher, Entry, Problem, object_entry
from aioflux.cli._output import MAX_LINES, call_in_daemon_thread, print_notice, write_stdout
from aioflux.cli._text import describe, one_line
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aioflux.cli._cp.local_files import Buffer, Outcome
    from aioflux.cli._cp.plan import CopyJob, JobOrProblem
    from aioflux.cli._output import Report
    from aioflux.cli._progress import CommandProgress
    from aioflux.options import WriteAttributes
    from aioflux.store import ObjectWriter, Store


_MAX_BATCHES = 4
_MAX_LARGE = 2
_MAX_READS = 3
"""Most attempts to copy a large object whose bytes do not match their checksum, or a file that
changes while it is copied."""
_PIECE_BYTES = 16 * 1024 * 1024
_STDIN_BYTES = 4 * 1024 * 1024
# Only the table in Python: the tables of the operating system differ between machines.
_TYPES = mimetypes.MimeTypes(filenames=())


class CopyWriter(Protocol):
    """Writer of one large object."""

    async def write(self, piece: Buffer, /) -> object:
        """Write the next bytes. The caller may reuse their memory afterwards."""


class CopySource(Protocol):
    """Reader of the objects of a copy."""

    async def read_many(self, jobs: Sequence[CopyJob]) -> list[Buffer | Exception]:
        """Read small objects whole; return the bytes or the error of each."""

    def pieces(self, job: CopyJob) -> AsyncGenerator[Buffer, None]:
        """Yield the bytes of a large object."""

    async def remove_many(self, jobs: Sequence[CopyJob]) -> list[Outcome]:
        """Delete the sources of jobs that were copied, unless they changed since."""


class CopyTarget(Protocol):
    """Writer of the objects of a copy."""

    async def write_many(
        self, jobs: Sequence[CopyJob], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        """Write small objects whole. If a body is an error, it is the outcome of its job."""

    def open_writer(self, job: CopyJob) -> AbstractAsyncContextManager[CopyWriter]:
        """Open a large object for writing.

        Raises:
            FileExistsError: The object exists, and must not be overwritten.
        """

    async def keeps(self, job: CopyJob) -> bool:
        """Return whether the target exists and must not be overwritten (`--no-clobber`)."""

    async def find(self, job: CopyJob) -> Entry | None:
        """Return what is at the target of a job."""

    async def remove_entries(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Delete objects, unless they changed since they were listed."""


async def _gather(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all calls; return errors of single objects as results, and raise other errors."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (StorageError, ValueError)):
            raise result
    return results


class StoreObjects:
    """Reader and writer of objects of one store.

    Args:
        store: The store.
        no_clobber: Do not overwrite existing objects.
        attributes: Attributes that all written objects get.
        source: Store from which objects are copied, if it is a store.
    """

    def __init__(
        self,
        store: Store,
        *,
        no_clobber: bool = False,
        attributes: WriteAttributes | None = None,
        source: Store | None = None,
    ) -> None:
        self.store = store
        self.attributes: WriteAttributes = attributes or {}
        self._source = source
        self._mode: Any = "create" if no_clobber else "overwrite"
        self._no_clobber = no_clobber

    async def read_many(self, jobs: Sequence[CopyJob]) -> list[Buffer | Exception]:
        return await _gather([self.store.get(job.read_from) for job in jobs])

    async def pieces(self, job: CopyJob) -> AsyncGenerator[Buffer, None]:
        async with self.store.open_reader(job.read_from) as reader:
            while piece := await reader.read(_PIECE_BYTES):
                yield piece

    async def write_many(
        self, jobs: Sequence[CopyJob], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        calls = [
            self._write(job, body)
            for job, body in zip(jobs, bodies, strict=True)
            if not isinstance(body, Exception)
        ]
        written = iter(await _gather(calls))
        return [body if isinstance(body, Exception) else next(written) for body in bodies]

    async def _write(self, job: CopyJob, body: Buffer) -> None:
        attributes = await self._attributes(job)
        await self.store.put(job.write_to, body, mode=self._mode, **attributes)

    async def copy_many(self, jobs: Sequence[CopyJob]) -> list[Outcome]:
        """Copy objects within the bucket; the service copies the bytes."""
        return await _gather([self._copy(job) for job in jobs])

    async def _copy(self, job: CopyJob) -> None:
        await self.store.copy(job.read_from, job.write_to, mode=self._mode)

    async def move_many(self, jobs: Sequence[CopyJob]) -> list[Outcome]:
        """Rename objects within the bucket; the service copies the bytes."""
        return await _gather([self._move(job) for job in jobs])

    async def _move(self, job: CopyJob) -> None:
        await self.store.move(job.read_from, job.write_to, mode=self._mode)

    async def remove_many(self, jobs: Sequence[CopyJob]) -> list[Outcome]:
        return await self.remove_metas([job.read_from for job in jobs])

    async def remove_entries(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Delete objects that were not overwritten since they were listed."""
        return await self.remove_metas([each.item for each in entries])

    async def remove_metas(self, metas: Sequence[ObjectMeta | str]) -> list[Outcome]:
        """Delete objects, each only in the generation of its metadata."""
        errors = (await self.store.delete_many(metas)).errors
        keys = (meta if isinstance(meta, str) else meta.key for meta in metas)
        return [errors.get(key) for key in keys]

    async def find(self, job: CopyJob) -> Entry | None:
        meta = await find(self.store, job.write_to)
        return None if meta is None else object_entry(meta)

    @asynccontextmanager
    async def open_writer(self, job: CopyJob) -> AsyncIterator[ObjectWriter]:
        if await self.keeps(job):
            raise FileExistsError(job.target)
        attributes = await self._attributes(job)
        async with self.store.open_writer(job.write_to, mode=self._mode, **attributes) as writer:
            yield writer

    async def keeps(self, job: CopyJob) -> bool:
        return self._no_clobber and await find(self.store, job.write_to) is not None

    async def _attributes(self, job: CopyJob) -> dict[str, Any]:
        """Return the attributes of a copy: those of the object, or a media type for its name."""
        meta = job.read_from
        if not isinstance(meta, ObjectMeta):
            # Standard input has no name: the name of the target decides.
            guessed = _guess_type(job.source if meta else job.write_to)
            return {"content_type": guessed, **self.attributes}
        if not meta.content_type and self._source is not None:
            meta = await self._source.head(meta)  # listings of S3 have no attributes
        return {**portable_attributes(meta), **self.attributes}


def _guess_type(name: str) -> str:
    """Return the media type for the extension of a name; empty if it is unknown."""
    guessed, encoding = _TYPES.guess_type(name, strict=True)
    return guessed or "" if encoding is None else ""


class StandardStreams:
    """Standard input as source, or standard output as target."""

    async def read_many(self, jobs: Sequence[CopyJob]) -> list[Buffer | Exception]:
        """Not called: the size of a stream is unknown, so it counts as large."""
        raise NotImplementedError(jobs)

    async def pieces(self, job: CopyJob) -> AsyncGenerator[Buffer, None]:
        del job
        while piece := await call_in_daemon_thread(_read_stdin):
            yield piece

    async def remove_many(self, jobs: Sequence[CopyJob]) -> list[Outcome]:
        """Not called: what a stream yielded is not in it any more."""
        raise NotImplementedError(jobs)

    async def remove_entries(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Not called: see `remove_many`."""
        raise NotImplementedError(entries)

    async def find(self, job: CopyJob) -> Entry | None:
        """Return None: a stream has no other contents."""
        del job
        return None

    async def write_many(
        self, jobs: Sequence[CopyJob], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for _, body in zip(jobs, bodies, strict=True):
            if isinstance(body, Exception):
                outcomes.append(body)
            else:
                await write_stdout(body)
                outcomes.append(None)
        return outcomes

    @asynccontextmanager
    async def open_writer(self, job: CopyJob) -> AsyncIterator[StandardStreams]:
        del job
        yield self

    async def keeps(self, job: CopyJob) -> bool:
        del job
        return False

    async def write(self, piece: Buffer) -> None:
        """Write to standard output."""
        await write_stdout(piece)


def _read_stdin() -> bytes:
    pieces = bytearray()
    while len(pieces) < _STDIN_BYTES and (piece := os.read(0, _STDIN_BYTES - len(pieces))):
        pieces += piece
    return bytes(pieces)


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
        # An object that is written after a change of its file looks newer than the file.
        self._files: LocalFiles | None = None
        if isinstance(source, LocalFiles) and isinstance(target, StoreObjects):
            self._files = source
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
            outcomes = await self._copy_bytes(batch)
            outcomes = await self._remove_copied(batch, outcomes)
        await asyncio.gather(*map(self._finish, batch, outcomes))

    async def _copy_bytes(self, batch: Sequence[CopyJob]) -> list[Outcome]:
        """Copy small objects; copy files again that changed meanwhile."""
        outcomes = await self._copy_bytes_once(batch)
        for _ in range(_MAX_READS - 1):
            changed = [at for at, each in enumerate(outcomes) if isinstance(each, FileChangedError)]
            if not changed:
                break
            again = await self._copy_bytes_once([batch[at] for at in changed])
            for at, outcome in zip(changed, again, strict=True):
                outcomes[at] = outcome
        return outcomes

    async def _copy_bytes_once(self, batch: Sequence[CopyJob]) -> list[Outcome]:
        bodies = await self._source.read_many(batch)
        outcomes = await self._target.write_many(batch, bodies)
        if self._files is not None:
            outcomes = await self._files.reject_changed(batch, outcomes)
        return outcomes

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
                if attempt == max_reads - 1 or not isinstance(
                    outcome, ChecksumError | FileChangedError
                ):
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
        if self._files is not None:
            return (await self._files.reject_changed([job], [None]))[0], num_bytes
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
