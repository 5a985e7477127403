"""Local files as source and target of a copy, in threads.

    bytes -> .aioflux-<random> in the same directory -> rename (link if it must be new)

Files appear whole or not at all. Like `cp` of Unix, a copy does not call fsync; a move does.
Directories that the copy created and that are empty at the end are removed, except those that an
object with a `/` at the end of its key represents.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from aioflux._concurrency.run_to_completion import run_in_thread
from aioflux._local_files import (
    TEMPORARY,
    FileChangedError,
    create_file,
    fill,
    is_same,
    mode_of_target,
    open_regular,
    reject_changed,
    remove_file,
    write_all,
)
from aioflux._values.checksums import crc32c
from aioflux.cli._cp.plan import LARGE_BYTES, Entry
from aioflux.cli._text import one_line

if TYPE_CHECKING:
    from aioflux.cli._cp.plan import CopyJob
    from aioflux.store import Store

T = TypeVar("T")
Buffer: TypeAlias = "bytes | bytearray | memoryview"
Outcome: TypeAlias = "Exception | None"
"""Result of one job: None if the object was copied, FileExistsError if the target exists and must
not be overwritten, or another error."""

_PIECE_BYTES = LARGE_BYTES
_CRC_BYTES = 1024 * 1024
_MAX_THREADS = 4


class FileThreads:
    """A few threads for blocking calls.

    Attributes:
        stop: Set when a call is cancelled. Functions that take long check it between two files.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._executor = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="aioflux")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread. A cancelled call still waits until the function returns."""
        return await run_in_thread(
            function, *arguments, executor=self._executor, on_cancel=self.stop.set
        )


class LocalFiles:
    """Reader and writer of local files.

    Args:
        threads: Threads for reads and writes.
        no_clobber: Do not overwrite existing files.
        root: Directory for copies whose names are keys of objects. No copy is written outside it,
            neither by `..` nor through a link in it. None if the user gave the names.
        keeps_times: Give copies of local files, too, the modification time of their source.
        is_durable: Write the copies to disk (fsync), because their sources are deleted.
    """

    def __init__(
        self,
        threads: FileThreads,
        *,
        no_clobber: bool = False,
        root: str | None = None,
        keeps_times: bool = False,
        is_durable: bool = False,
    ) -> None:
        self._threads = threads
        self._is_durable = is_durable
        self._keeps_times = keeps_times
        self.no_clobber = no_clobber
        self._root = None if root is None else root.rstrip("/")
        self._known: set[str] = set()
        self._created: list[str] = []
        self._markers: set[str] = set()
        self._read_states: dict[str, os.stat_result] = {}
        """Status of each file when it was read, until `reject_changed`."""

    async def read_many(self, jobs: Sequence[CopyJob]) -> list[Buffer | Exception]:
        return await self._threads.run(self._read_all, jobs)

    def _read_all(self, jobs: Sequence[CopyJob]) -> list[Buffer | Exception]:
        found: list[Buffer | Exception] = []
        for job in jobs:
            if self._threads.stop.is_set():
                break
            try:
                data, self._read_states[job.source] = _read_whole(str(job.read_from))
                found.append(data)
            except (OSError, ValueError) as exc:
                found.append(exc)
        return found

    async def reject_changed(
        self, jobs: Sequence[CopyJob], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Return the outcomes, with an error for each file that changed after it was read.

        An object that is written after such a change looks newer than the file.
        """
        return await self._threads.run(lambda: list(map(self._recheck, jobs, outcomes)))

    def _recheck(self, job: CopyJob, outcome: Outcome) -> Outcome:
        before = self._read_states.pop(job.source, None)
        if outcome is not None or before is None:
            return outcome
        try:
            after = os.stat(str(job.read_from))
        except OSError:
            return None  # it was deleted after it was copied
        if is_same(before, after) and before.st_ctime_ns == after.st_ctime_ns:
            return None
        return FileChangedError(
            f"{one_line(job.source)} changed while it was copied, and the copy has the bytes from "
            "before; copy it again"
        )

    async def write_many(
        self, jobs: Sequence[CopyJob], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        return await self._threads.run(self._write_all, jobs, bodies)

    def _write_all(
        self, jobs: Sequence[CopyJob], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for job, body in zip(jobs, bodies, strict=True):
            if self._threads.stop.is_set():
                break
            if isinstance(body, Exception):
                outcomes.append(body)
                continue
            try:
                self._write(job, body)
                outcomes.append(None)
            except (OSError, ValueError) as exc:
                outcomes.append(exc)
        return outcomes

    def _write(self, job: CopyJob, body: Buffer) -> None:
        path = job.write_to
        if path.endswith("/"):
            self._write_marker(path, body)
            return
        if self._keeps(path):
            raise FileExistsError(path)
        descriptor, temporary = self._create_temporary(path)
        try:
            try:
                write_all(descriptor, body)
                self._complete(descriptor, job)
            finally:
                os.close(descriptor)
            self._publish(temporary, path)
        except BaseException:
            remove_file(temporary)
            raise

    def _complete(self, descriptor: int, job: CopyJob) -> None:
        """Set the time of a file, and write it to disk if needed."""
        self._set_time(descriptor, job)
        if self._is_durable:
            os.fsync(descriptor)

    def _set_time(self, file: int | str, job: CopyJob) -> None:
        if job.mtime_ns and (self._keeps_times or not isinstance(job.read_from, str)):
            os.utime(file, ns=(job.mtime_ns, job.mtime_ns))

    async def keeps(self, job: CopyJob) -> bool:
        return not job.write_to.endswith("/") and self._keeps(job.write_to)

    def _keeps(self, path: str) -> bool:
        return self.no_clobber and os.path.lexists(path)

    async def find(self, job: CopyJob) -> Entry | None:
        """Return the file that is at the target of a job."""
        with suppress(OSError):
            return file_entry(job.write_to, os.stat(job.write_to))
        return None

    async def remove_many(self, jobs: Sequence[CopyJob]) -> list[Outcome]:
        """Delete the sources of jobs that were copied, if they were not changed since."""
        return await self._threads.run(
            lambda: [_remove(str(job.read_from), job.size, job.mtime_ns) for job in jobs]
        )

    async def remove_entries(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Delete files that were not changed since they were listed."""
        return await self._threads.run(
            lambda: [_remove(str(each.item), each.size, each.mtime_ns) for each in entries]
        )

    def _write_marker(self, path: str, body: Buffer) -> None:
        """Create the directory that an empty object with a `/` at the end of its key represents."""
        if len(body):
            raise ValueError(
                f"{one_line(path)} cannot be a file: the object's name ends in '/', and it is not "
                "empty; copy it to another name, without -r"
            )
        directory = path.rstrip("/")
        self._reject_links(directory)
        self._make_directory(directory)
        self.keep_directory(directory)

    def keep_directory(self, path: str) -> None:
        """Never remove a directory, because an object represents it."""
        self._markers.add(path.rstrip("/"))

    async def pieces(self, job: CopyJob) -> AsyncGenerator[memoryview, None]:
        """See CopySource; each piece is overwritten by the next one.

        Raises:
            ValueError: The file changed while it was read.
        """
        path = str(job.read_from)
        descriptor = open_regular(path)
        try:
            before = os.fstat(descriptor)
            buffer = memoryview(bytearray(_PIECE_BYTES))
            done = 0
            while num_read := await self._threads.run(fill, descriptor, buffer, done):
                done += num_read
                yield buffer[:num_read]
            reject_changed(path, before, os.fstat(descriptor), done)
            self._read_states[job.source] = before
        finally:
            os.close(descriptor)

    @asynccontextmanager
    async def open_writer(self, job: CopyJob) -> AsyncIterator[FileWriter]:
        path = job.write_to
        if self._keeps(path):
            raise FileExistsError(path)
        # Not in a thread: a cancelled call would not return the name of the file to remove.
        descriptor, temporary = self._create_temporary(path)
        try:
            try:
                yield FileWriter(self._threads, descriptor)
                await self._threads.run(self._complete, descriptor, job)
            finally:
                os.close(descriptor)
            await self._threads.run(self._publish, temporary, path)
        except BaseException:
            remove_file(temporary)
            raise

    async def download(self, store: Store, job: CopyJob, progress: Callable[[int], object]) -> None:
        """Write a large object; ranges that an interrupted run has received are not read again."""
        path = job.write_to
        self._make_parent(path)
        await store.download_file(job.read_from, path, progress=progress)
        self._set_time(path, job)
        if self._is_durable:
            await self._threads.run(_fsync, path)
            await self._threads.run(_fsync, os.path.dirname(path) or ".")

    def _make_parent(self, path: str) -> tuple[str, int | None]:
        """Create the directory of a path if needed; return it, and the mode of the file there.

        Raises:
            ValueError: The path exists and is not a regular file.
        """
        parent = os.path.dirname(path) or "."
        if parent not in self._known:
            self._reject_links(parent)
        mode = mode_of_target(path)
        if parent not in self._known:
            self._make_directory(parent)
        return parent, mode

    def _create_temporary(self, path: str) -> tuple[int, str]:
        """Create a temporary file in the directory of a path. Raises errors as `_make_parent`."""
        parent, mode = self._make_parent(path)
        temporary = f"{parent}/{TEMPORARY}{uuid.uuid4().hex}"
        return create_file(temporary, mode), temporary

    def _publish(self, temporary: str, path: str) -> None:
        """Give a temporary file its final name.

        Raises:
            FileExistsError: Another process has created the path, and it must not be overwritten.
        """
        if self.no_clobber:
            os.link(temporary, path)
            remove_file(temporary)
        else:
            os.replace(temporary, path)
        if self._is_durable:
            _fsync(os.path.dirname(path) or ".")

    def _reject_links(self, path: str) -> None:
        """Reject a directory whose path contains a symbolic link below `root`."""
        if self._root is None:
            return
        at = self._root
        for segment in path[len(at) :].split("/")[1:]:
            at = f"{at}/{segment}"
            if at not in self._known and os.path.islink(at):
                raise ValueError(
                    f"cannot write below {one_line(at)}: it is a link, which may lead out of the "
                    "target directory; copy to the directory that it points to"
                )

    def _make_directory(self, path: str) -> None:
        missing = []
        at = path
        while at and not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for each in reversed(missing):
            try:
                os.mkdir(each)
            except FileExistsError:
                if not os.path.isdir(each):
                    raise ValueError(
                        f"cannot write below {one_line(each)}: it is a file where this object "
                        "needs a directory; copy one of the two elsewhere"
                    ) from None
            else:
                self._created.append(each)
        self._known.add(path)

    def remove_empty_parents(self, root: str, paths: Iterable[str]) -> None:
        """Remove the directories below `root` in which files were, if they are empty now."""
        root = root.rstrip("/")
        for path in paths:
            at = os.path.dirname(path)
            while at.startswith(f"{root}/") and at not in self._markers:
                try:
                    os.rmdir(at)
                except OSError:
                    break
                at = os.path.dirname(at)

    def remove_empty_directories(self) -> None:
        """Remove the directories that were created and are empty."""
        for path in sorted(set(self._created) - self._markers, reverse=True):
            with suppress(OSError):
                os.rmdir(path)
        self._created.clear()


class FileWriter:
    """A temporary file for the pieces of a large object."""

    def __init__(self, threads: FileThreads, descriptor: int) -> None:
        self._threads = threads
        self._descriptor = descriptor

    async def write(self, piece: Buffer) -> None:
        await self._threads.run(write_all, self._descriptor, piece)


def file_entry(path: str, status: os.stat_result) -> Entry:
    """Return the entry of a file."""
    return Entry(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def file_crc32c(path: str) -> int:
    """Return the CRC32C of a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file changed while it was read.
    """
    checksum = 0
    descriptor = open_regular(path)
    try:
        before = os.fstat(descriptor)
        buffer, done = memoryview(bytearray(_CRC_BYTES)), 0
        while num_read := fill(descriptor, buffer, done):
            checksum = crc32c(buffer[:num_read], checksum)
            done += num_read
        reject_changed(path, before, os.fstat(descriptor), done)
    finally:
        os.close(descriptor)
    return checksum


def _remove(path: str, size: int, mtime_ns: int) -> Outcome:
    """Delete a file that still has this size and time; return the error if that fails."""
    try:
        status = os.stat(path)
        if (status.st_size, status.st_mtime_ns) == (size, mtime_ns):
            os.unlink(path)
            return None
    except OSError as exc:
        return exc
    return ValueError(f"did not delete {one_line(path)}: it changed after it was listed")


def remove_empty_tree(root: str) -> None:
    """Remove a directory and those below it, except those in which something is."""
    for directory, _, _ in os.walk(root, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)


def _fsync(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # a file that its mode lets only be written
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_whole(path: str) -> tuple[bytes, os.stat_result]:
    descriptor = open_regular(path)
    try:
        before = os.fstat(descriptor)
        # One byte more than the size, to detect a file that has grown.
        data = os.read(descriptor, before.st_size + 1)
        reject_changed(path, before, os.fstat(descriptor), len(data))
    finally:
        os.close(descriptor)
    return data, before
