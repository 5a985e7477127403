"""Objects of a copy, read pinned and verified, written whole or not at all; standard streams."""

from __future__ import annotations

import asyncio
import mimetypes
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from aioflux._values.meta import ObjectMeta
from aioflux.cli._copy_disk import SKIPPED
from aioflux.cli._event_loop import in_daemon
from aioflux.cli._ls import find
from aioflux.cli._stdout import write_stdout
from aioflux.errors import AlreadyExistsError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
    from contextlib import AbstractAsyncContextManager

    from aioflux.cli._copy_disk import Buffer, Outcome
    from aioflux.cli._copy_plan import Job
    from aioflux.store import ObjectWriter, Store

__all__ = ["Goal", "Origin", "Sink", "Standard", "Stored", "guess_type"]

_PIECE_BYTES = 16 * 1024 * 1024
_STDIN_BYTES = 4 * 1024 * 1024
# Only the table that Python brings: what a name means does not depend on the machine.
_TYPES = mimetypes.MimeTypes(filenames=())


class Sink(Protocol):
    """Takes the pieces of one large object, which appears when all of them are there."""

    was_skipped: bool

    async def write(self, piece: Buffer) -> None:
        """Take the next bytes; their memory may be used again when this returns."""


class Origin(Protocol):
    """Where objects are read."""

    async def read_many(self, jobs: Sequence[Job]) -> list[Buffer | Exception]:
        """Read small objects whole, each its bytes or its error."""

    def pieces(self, job: Job) -> AsyncGenerator[Buffer, None]:
        """Yield the bytes of a large object."""


class Goal(Protocol):
    """Where objects are written."""

    async def write_many(
        self, jobs: Sequence[Job], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        """Write small objects whole; an error among the bodies is its own outcome."""

    def sink(self, job: Job) -> AbstractAsyncContextManager[Sink | None]:
        """Write a large object; None where there is one already that must stay."""

    async def keeps(self, job: Job) -> bool:
        """Tell whether there is one already that must stay."""


def guess_type(name: str) -> str:
    """Return the media type that the end of a name stands for; empty for the default."""
    guessed, encoding = _TYPES.guess_type(name, strict=True)
    return guessed or "" if encoding is None else ""


async def each(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all calls at once; errors of storage stand where the results would.

    What stops everything (credentials, mistakes in here) is raised, when all are over.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (StorageError, ValueError)):
            raise result
    return results


class Stored:
    """Objects of one store."""

    def __init__(self, store: Store, *, no_clobber: bool = False) -> None:
        self.store = store
        self._mode: Any = "create" if no_clobber else "overwrite"
        self._no_clobber = no_clobber

    async def read_many(self, jobs: Sequence[Job]) -> list[Buffer | Exception]:
        """See Origin."""
        return await each([self.store.get(job.origin) for job in jobs])

    async def pieces(self, job: Job) -> AsyncGenerator[Buffer, None]:
        """See Origin."""
        async with self.store.open_reader(job.origin) as reader:
            while piece := await reader.read(_PIECE_BYTES):
                yield piece

    async def write_many(
        self, jobs: Sequence[Job], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        """See Goal."""
        # What could not be read is kept from `each`, which would take it for a failure of here.
        calls = [
            self._write(job, body)
            for job, body in zip(jobs, bodies, strict=True)
            if not isinstance(body, Exception)
        ]
        written = iter(await each(calls))
        return [body if isinstance(body, Exception) else next(written) for body in bodies]

    async def _write(self, job: Job, body: Buffer) -> Outcome:
        try:
            await self.store.put(job.goal, body, mode=self._mode, **_settings(job))
        except AlreadyExistsError:
            return SKIPPED
        return None

    async def copy_many(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Copy objects within the bucket, on the service."""
        return await each([self._copy(job) for job in jobs])

    async def _copy(self, job: Job) -> Outcome:
        try:
            await self.store.copy(job.origin, job.goal, mode=self._mode)
        except AlreadyExistsError:
            return SKIPPED
        return None

    @asynccontextmanager
    async def sink(self, job: Job) -> AsyncIterator[StoredSink | None]:
        """See Goal."""
        if await self.keeps(job):
            yield None
            return
        sink: StoredSink | None = None
        try:
            async with self.store.open_writer(
                job.goal, mode=self._mode, **_settings(job)
            ) as writer:
                sink = StoredSink(writer)
                yield sink
        except AlreadyExistsError:
            if sink is None:
                raise
            sink.was_skipped = True

    async def keeps(self, job: Job) -> bool:
        """See Goal."""
        return self._no_clobber and await find(self.store, job.goal) is not None


class StoredSink:
    """An object under construction.

    Attributes:
        was_skipped: Set where the object turned out to exist when all was written.
    """

    def __init__(self, writer: ObjectWriter) -> None:
        self.was_skipped = False
        self._writer = writer

    async def write(self, piece: Buffer) -> None:
        """Take the next bytes."""
        await self._writer.write(piece)


def _settings(job: Job) -> dict[str, Any]:
    """Return what else than its bytes an object takes along.

    Raises:
        StorageError: It has something that would be lost.
    """
    if not isinstance(job.origin, ObjectMeta):
        # Standard input has no name; its copy has one.
        return {"content_type": guess_type(job.source if job.origin else job.goal)}
    if job.origin.content_encoding:
        raise StorageError(
            f"cannot copy {job.source} to another bucket: it is stored compressed "
            f"({job.origin.content_encoding}), which the copy would not say of itself; copy it to "
            "local disk, and uncompress it there",
            uri=job.source,
        )
    return {"content_type": job.origin.content_type, "metadata": job.origin.metadata}


class Standard:
    """Standard input as an origin, standard output as a goal; for one object."""

    was_skipped = False

    async def read_many(self, jobs: Sequence[Job]) -> list[Buffer | Exception]:
        """Never called: nobody knows the size of a stream."""
        raise NotImplementedError(jobs)

    async def pieces(self, job: Job) -> AsyncGenerator[Buffer, None]:
        """See Origin."""
        del job
        while piece := await in_daemon(_read_stdin):
            yield piece

    async def write_many(
        self, jobs: Sequence[Job], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        """See Goal."""
        outcomes: list[Outcome] = []
        for _, body in zip(jobs, bodies, strict=True):
            if isinstance(body, Exception):
                outcomes.append(body)
            else:
                await self.write(body)
                outcomes.append(None)
        return outcomes

    @asynccontextmanager
    async def sink(self, job: Job) -> AsyncIterator[Standard]:
        """See Goal."""
        del job
        yield self

    async def keeps(self, job: Job) -> bool:
        """See Goal."""
        del job
        return False

    async def write(self, piece: Buffer) -> None:
        """Write to standard output; waits for its reader."""
        await in_daemon(write_stdout, piece)


def _read_stdin() -> bytes:
    pieces = bytearray()
    while len(pieces) < _STDIN_BYTES and (piece := os.read(0, _STDIN_BYTES - len(pieces))):
        pieces += piece
    return bytes(pieces)
