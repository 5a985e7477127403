"""Local files of a copy: read and written in threads, many at a time.

    bytes -> .aioflux-<random> beside the target -> rename (or link, where it must be new)

Nothing is synced: like `cp`, the command ends when the system has the bytes. Files that appear are
whole; directories that were made for nothing are removed.
"""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from aioflux.cli._copy_plan import LARGE_BYTES, TEMPORARY, Job, Problem, is_temporary
from aioflux.cli._text import one_line

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

    from aioflux.cli._event_loop import Threads

__all__ = ["SKIPPED", "Disk", "DiskSink", "Outcome", "walk"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
SKIPPED = "skipped"
Outcome: TypeAlias = "Exception | str | None"
"""What became of one object: an error, SKIPPED where there was one already, None where it went
well."""

_PIECE_BYTES = LARGE_BYTES


class Disk:
    """Reads and writes local files.

    Args:
        threads: What reads and writes.
        no_clobber: Whether files that exist stay as they are.
        root: The directory that names of objects never lead out of, by no link either; it may be a
            link itself. None where names are those that the user gave.
    """

    def __init__(self, threads: Threads, *, no_clobber: bool, root: str | None = None) -> None:
        self._threads = threads
        self._no_clobber = no_clobber
        self._root = None if root is None else root.rstrip("/")
        self._known: set[str] = set()
        self._made: list[str] = []
        self._wanted: set[str] = set()

    async def read_many(self, jobs: Sequence[Job]) -> list[Buffer | Exception]:
        """Read small files whole."""
        return await self._threads.run(self._read_all, jobs)

    def _read_all(self, jobs: Sequence[Job]) -> list[Buffer | Exception]:
        found: list[Buffer | Exception] = []
        for job in jobs:
            if self._threads.stop.is_set():
                break
            try:
                found.append(_read_whole(str(job.origin)))
            except (OSError, ValueError) as exc:
                found.append(exc)
        return found

    async def write_many(
        self, jobs: Sequence[Job], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        """Write small files whole; an error among the bodies is its own outcome."""
        return await self._threads.run(self._write_all, jobs, bodies)

    def _write_all(
        self, jobs: Sequence[Job], bodies: Sequence[Buffer | Exception]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for job, body in zip(jobs, bodies, strict=True):
            if self._threads.stop.is_set():
                break
            if isinstance(body, Exception):
                outcomes.append(body)
                continue
            try:
                outcomes.append(self._write(job.goal, body))
            except (OSError, ValueError) as exc:
                outcomes.append(exc)
        return outcomes

    def _write(self, path: str, body: Buffer) -> Outcome:
        if path.endswith("/"):
            self._write_marker(path, body)
            return None
        if self._keeps(path):
            return SKIPPED
        descriptor, temporary = self.begin(path)
        try:
            try:
                _write_to(descriptor, body)
            finally:
                os.close(descriptor)
            return self.reveal(temporary, path)
        except BaseException:
            self.drop(temporary)
            raise

    async def keeps(self, job: Job) -> bool:
        """See Goal."""
        return not job.goal.endswith("/") and self._keeps(job.goal)

    def _keeps(self, path: str) -> bool:
        return self._no_clobber and os.path.lexists(path)

    def _write_marker(self, path: str, body: Buffer) -> None:
        """Make the directory that an empty object of this name stands for."""
        if len(body):
            raise ValueError(
                f"{one_line(path)} cannot be a file: the object's name ends in '/', and it is not "
                "empty; copy it by itself to another name"
            )
        directory = path.rstrip("/")
        self._refuse_links(directory)
        self._make_directory(directory)
        self._wanted.add(directory)

    async def pieces(self, job: Job) -> AsyncGenerator[memoryview, None]:
        """Yield the bytes of a large file, each piece in memory that the next one takes again.

        Raises:
            ValueError: It changed while it was read.
        """
        path = str(job.origin)
        descriptor = _open_regular(path)
        try:
            before = os.fstat(descriptor)
            buffer = memoryview(bytearray(_PIECE_BYTES))
            done = 0
            while num_read := await self._threads.run(_fill, descriptor, buffer):
                done += num_read
                yield buffer[:num_read]
            _refuse_changed(path, before, os.fstat(descriptor), done)
        finally:
            os.close(descriptor)

    @asynccontextmanager
    async def sink(self, job: Job) -> AsyncIterator[DiskSink | None]:
        """Write a large file piece by piece; None where it exists and must stay."""
        path = job.goal
        if self._keeps(path):
            yield None
            return
        # Not in a thread: what a cancelled call made, nobody would remove.
        descriptor, temporary = self.begin(path)
        try:
            try:
                sink = DiskSink(self._threads, descriptor)
                yield sink
            finally:
                os.close(descriptor)
            if await self._threads.run(self.reveal, temporary, path) == SKIPPED:
                sink.was_skipped = True
        except BaseException:
            self.drop(temporary)
            raise

    def begin(self, path: str) -> tuple[int, str]:
        """Make an empty temporary file beside a path, and the directories above it.

        Raises:
            ValueError: There is something at the path that no file should take the place of.
        """
        parent = os.path.dirname(path) or "."
        if parent not in self._known:
            self._refuse_links(parent)
        mode: int | None = None
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise ValueError(
                    f"cannot write {one_line(path)}: it is a directory where this object needs a "
                    "file; copy one of the two elsewhere"
                )
            if not stat.S_ISREG(mode):
                raise ValueError(f"cannot write {one_line(path)}: it is no regular file")
        if parent not in self._known:
            self._make_directory(parent)
        temporary = f"{parent}/{TEMPORARY}{uuid.uuid4().hex}"
        return _create(temporary, None if mode is None else mode & 0o777), temporary

    def reveal(self, temporary: str, path: str) -> Outcome:
        """Give a temporary file its name."""
        if not self._no_clobber:
            os.replace(temporary, path)
            return None
        try:
            os.link(temporary, path)
        except FileExistsError:
            return SKIPPED
        finally:
            self.drop(temporary)
        return None

    def drop(self, temporary: str) -> None:
        """Remove a temporary file, if it is still there."""
        with suppress(FileNotFoundError):
            os.unlink(temporary)

    def _refuse_links(self, path: str) -> None:
        """Refuse a directory that a link below the target leads to: it may be anywhere."""
        if self._root is None:
            return
        at = self._root
        for segment in path[len(at) :].split("/")[1:]:
            at = f"{at}/{segment}"
            if at not in self._known and os.path.islink(at):
                raise ValueError(
                    f"cannot write below {one_line(at)}: it is a link, which may lead out of the "
                    "target directory; copy to where it leads by itself"
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
                self._made.append(each)
        self._known.add(path)

    def tidy(self) -> None:
        """Remove the directories that were made and hold nothing."""
        for path in sorted(set(self._made) - self._wanted, reverse=True):
            with suppress(OSError):
                os.rmdir(path)
        self._made.clear()


class DiskSink:
    """A temporary file that takes the pieces of a large object.

    Attributes:
        was_skipped: Set where the file turned out to exist when all was written.
    """

    def __init__(self, threads: Threads, descriptor: int) -> None:
        self.was_skipped = False
        self._threads = threads
        self._descriptor = descriptor

    async def write(self, piece: Buffer) -> None:
        """Append bytes."""
        await self._threads.run(_write_to, self._descriptor, piece)


def _create(path: str, mode: int | None) -> int:
    """Make a file, with the mode of the one that it will replace."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if mode is None:
        return os.open(path, flags, 0o666)
    # Never wider than it will be, not even before it has its mode.
    descriptor = os.open(path, flags, mode)
    try:
        os.fchmod(descriptor, mode)
    except PermissionError:
        pass  # a file system without modes
    except BaseException:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor


def _write_to(descriptor: int, data: Buffer) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _open_regular(path: str) -> int:
    # Without O_NONBLOCK, a pipe that nobody writes to would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"cannot read {one_line(path)}: it is no regular file")
    return descriptor


def _read_whole(path: str) -> bytes:
    descriptor = _open_regular(path)
    try:
        before = os.fstat(descriptor)
        # One byte more, to notice a file that has grown.
        data = os.read(descriptor, before.st_size + 1)
        _refuse_changed(path, before, os.fstat(descriptor), len(data))
    finally:
        os.close(descriptor)
    return data


def _fill(descriptor: int, buffer: memoryview) -> int:
    done = 0
    while done < buffer.nbytes:
        num_read = os.readv(descriptor, [buffer[done:]])
        if not num_read:
            break
        done += num_read
    return done


def _refuse_changed(
    path: str, before: os.stat_result, after: os.stat_result, num_read: int
) -> None:
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if not same or num_read != before.st_size:
        raise ValueError(
            f"could not read {one_line(path)}: it changed while it was read; copy it again"
        )


def walk(root: str, stop: threading.Event) -> Iterator[tuple[str, int] | Problem]:
    """Yield (path below `root`, size) of every file below a directory, in key order.

    Links to files are followed; links to directories and what is no file are problems, said and not
    copied. Temporary files of writes under way are left out.
    """
    pending = [("", root)]
    while pending:
        base, directory = pending.pop()
        if not base.endswith("/") and base:
            yield _measure(base, directory)
            continue
        try:
            with os.scandir(directory) as found:
                entries = [each for each in found if not is_temporary(each.name)]
        except OSError as exc:
            yield Problem(f"cannot list {one_line(directory)}: {exc.strerror}")
            continue
        if stop.is_set():
            return
        names = [
            (base + each.name + ("/" if each.is_dir(follow_symlinks=False) else ""), each.path)
            for each in entries
        ]
        pending += sorted(names, reverse=True)


def _measure(below: str, path: str) -> tuple[str, int] | Problem:
    try:
        status = os.stat(path)
    except OSError as exc:
        return Problem(f"cannot read {one_line(path)}: {exc.strerror}")
    if stat.S_ISDIR(status.st_mode):
        return Problem(
            f"did not follow {one_line(path)}: it is a link to a directory; copy that by itself"
        )
    if not stat.S_ISREG(status.st_mode):
        return Problem(f"cannot read {one_line(path)}: it is no regular file")
    return below, status.st_size
