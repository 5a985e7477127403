"""Objects of a store and standard streams as source and target of a copy."""

from __future__ import annotations

import asyncio
import mimetypes
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from aioflux._values.meta import ObjectMeta, portable_attributes
from aioflux.cli._cp.plan import Entry, object_entry
from aioflux.cli._output import call_in_daemon_thread, write_stdout
from aioflux.cli._uri_or_path import find
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aioflux.cli._cp.local_files import Buffer, Outcome
    from aioflux.cli._cp.plan import CopyJob
    from aioflux.options import WriteAttributes
    from aioflux.store import ObjectWriter, Store

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
