"""Atomic writes of files, on local file systems and on NFS.

    create temporary file -> write -> fsync -> lock -> link or rename -> fsync of the directory

A killed writer may leave a temporary file, or an empty lock file; listings do not show them.

On NFS with the default mount options, writes are atomic between machines, too. Details of NFS:

- For `acregmax` seconds (60 by default) after another machine replaced an object, a read by key may
  return the old object as a whole.
- If a file is removed during a read, the read fails with ESTALE and is retried. The retry raises
  NotFoundError if it is pinned to a generation.
- A conditional write creates its lock file in the directory of the object, which makes the NFS
  client read the directory again. With the mount options `nolock` or `local_lock`, locks have no
  effect between machines.
- The NFS client may send a link, rename or delete again after a lost response. The error of the
  second request is ignored if the first request had succeeded.
- If the disk of the server is full, the fsync fails, before the object is published.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._local_files import TEMPORARY
from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

BLOCK_BYTES = 16 * 1024 * 1024
"""Largest number of bytes read or written between two calls of `Stop.check`: 2 to 10 ms."""


class Stop:
    """Flag that the event loop sets to stop work in a thread."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Make the next `check` raise; may be called from any thread."""
        self._is_set = True

    def check(self) -> None:
        """Raise InterruptedError if the work was cancelled."""
        if self._is_set:
            raise InterruptedError(errno.EINTR, "cancelled")


async def in_thread(work: Callable[[Stop], T], *, into_callers_memory: bool = False) -> T:
    """Run blocking work in a thread; after a cancellation it stops at its next `Stop.check`.

    Args:
        work: Called with a `Stop`, which it must check regularly.
        into_callers_memory: The work writes into memory of the caller, so that a cancellation waits
            until the work has stopped.
    """
    stop = Stop()
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work, stop)
    except RuntimeError:
        return work(stop)  # at interpreter exit, no new thread can be started
    try:
        return await (asyncio.shield(future) if into_callers_memory else future)
    except asyncio.CancelledError:
        stop.set()
        while into_callers_memory and not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if into_callers_memory and not future.cancelled():
            future.exception()  # retrieve it, so that the loop does not log it
        raise


_ATTRIBUTE: Final = "user.aioflux.crc32c"
_VALUE: Final = re.compile(rb"([0-9a-f]{8}) ([0-9]+) (-?[0-9]+)")

_NO_ATTRIBUTES: Final = frozenset(
    {
        errno.ENOTSUP,
        errno.ENOSYS,
        errno.EPERM,
        errno.EACCES,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.E2BIG,
        errno.ENODATA,
    }
)
"""Errors for a file that does not have, or cannot have, the attribute (setxattr(2), xattr(7))."""


def record_checksum(descriptor: int, status: os.stat_result, crc32c: int) -> None:
    """Record the crc32c of a file, if its file system supports extended attributes.

    This takes 5 microseconds on ext4. The next fsync makes the attribute durable. Content and
    modification time of the file must not change after `status` was read.
    """
    if sys.platform == "linux":
        value = f"{crc32c:08x} {status.st_size} {status.st_mtime_ns}"
        try:
            os.setxattr(descriptor, _ATTRIBUTE, value.encode())
        except OSError as exc:
            if exc.errno not in _NO_ATTRIBUTES:
                raise


def read_checksum(file: int | str | Path, status: os.stat_result) -> int | None:
    """Return the recorded crc32c of a file; None if there is none for this size and time.

    This takes 4 microseconds on ext4.
    """
    if sys.platform == "linux":
        try:
            value = os.getxattr(file, _ATTRIBUTE)
        except OSError as exc:
            if exc.errno not in _NO_ATTRIBUTES:
                raise
            return None
        match = _VALUE.fullmatch(value)
        if match is not None and (int(match[2]), int(match[3])) == (
            status.st_size,
            status.st_mtime_ns,
        ):
            return int(match[1], 16)
    return None


_MAX_DIRECTORY_RACES = 100
"""Maximum number of attempts to create a file while deletes remove its empty directory."""
_LOCK_SECONDS = 0.0005
"""First interval of polling a lock. A writer holds the lock for one rename and one fsync."""
_MAX_LOCK_SECONDS = 0.02
"""Longest interval of polling a lock; the interval doubles after each poll."""
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LINK_ERRNOS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def new_temporary(path: Path, root: Path) -> Path:
    """Create an empty temporary file in the directory of a path, and missing directories."""
    temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        for attempt in range(_MAX_DIRECTORY_RACES):
            try:
                _make_directories(path.parent)
                temporary.touch(exist_ok=False)
                break
            except (FileNotFoundError, FileExistsError):
                # A delete of the last object may have removed the directory since it was created.
                if attempt == _MAX_DIRECTORY_RACES - 1 or _has_file_above(path.parent):
                    raise
    except OSError:
        prune(temporary, root)
        raise
    return temporary


def _has_file_above(directory: Path) -> bool:
    """Return whether a file or a broken link is in the path of a directory."""
    for ancestor in (directory, *directory.parents):
        try:
            if not stat.S_ISDIR(ancestor.stat().st_mode):
                return True
        except FileNotFoundError:
            if ancestor.is_symlink():
                return True
    return False


def _make_directories(directory: Path) -> None:
    missing: list[Path] = []
    for ancestor in (directory, *directory.parents):
        if ancestor.is_dir():
            break
        missing.append(ancestor)
    for ancestor in reversed(missing):
        with suppress(FileExistsError):
            ancestor.mkdir()
            sync_directory(ancestor.parent)


def prune(path: Path, root: Path) -> None:
    """Remove the empty directories above a path, since a bucket has no empty directories."""
    for parent in path.parents:
        if parent == root or not parent.is_relative_to(root):
            break
        try:
            parent.rmdir()
        except OSError as exc:
            # A directory that does not exist may have an empty parent.
            if exc.errno not in {errno.ENOENT, errno.ENAMETOOLONG}:
                break


def write_all(
    descriptor: int, pieces: Sequence[bytes | memoryview], offset: int, stop: Stop
) -> int:
    """Write all pieces, one after another from `offset` on, and return their crc32c."""
    checksum = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            stop.check()
            num_written = os.pwrite(descriptor, view[:BLOCK_BYTES], offset)
            checksum = crc32c(view[:num_written], checksum)
            view, offset = view[num_written:], offset + num_written
    return checksum


def finish(descriptor: int, checksum: int | None) -> os.stat_result:
    """Set the modification time of a file, record its checksum, sync it, and return its status.

    The time is set because the kernel's clock for files advances only every 4 ms: a new file with a
    reused inode could get the generation of the old file. `checksum` is the crc32c of the content,
    or None if it is not known.
    """
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))
    if checksum is not None:
        record_checksum(descriptor, os.fstat(descriptor), checksum)
    os.fsync(descriptor)
    return os.fstat(descriptor)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable, since fsync of a file does not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # the file system cannot sync a directory
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, stop: Stop, *, required: bool = False) -> Iterator[None]:
    """Hold the lock of an object, which excludes other processes on all machines.

    The kernel releases the lock of a killed process, but not that of a suspended process. So the
    wait must be cancellable.

    Args:
        path: Path of the object, whose directory must exist.
        stop: Cancels the wait.
        required: Raise OSError on a file system without locks; if False, continue without a lock.
    """
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=16).hexdigest()
    lock = path.with_name(f"{TEMPORARY}lock-{name}")
    descriptor = _lock(lock, stop, required=required)
    try:
        yield
    finally:
        if descriptor is not None:
            # Remove the file before unlocking it. A waiting writer then acquires the lock of a
            # removed file, which `_lock` detects, and opens a new file.
            lock.unlink(missing_ok=True)
            # `close` alone would not unlock it while a forked child also has the file open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(lock: Path, stop: Stop, *, required: bool) -> int | None:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _acquire(descriptor, stop)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    return descriptor
        except OSError as exc:
            os.close(descriptor)
            if exc.errno not in _NO_LOCK_ERRNOS:
                raise  # do not remove the file: another writer may hold the lock
            lock.unlink(missing_ok=True)
            if required:
                raise
            return None
        os.close(descriptor)


def _acquire(descriptor: int, stop: Stop) -> None:
    """Acquire a lock by polling, since a blocking `flock` could not be cancelled."""
    seconds = _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stop.check()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MAX_LOCK_SECONDS)
        else:
            return


def link_new(temporary: Path, path: Path) -> None:
    """Publish a file under a name that must not exist.

    Raises:
        FileExistsError: The name exists.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS may repeat a link after a lost response: then `path` already is this file.
        if not _is_same(temporary.stat(), path):
            raise
    except OSError as exc:
        if exc.errno not in _NO_LINK_ERRNOS:
            raise
        # Hard links are not possible here. The lock excludes other writers of this package.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from exc
        temporary.replace(path)
    sync_directory(path.parent)


def replace_file(temporary: Path, path: Path) -> None:
    """Publish a file under a name, replacing the object of that name.

    Raises:
        IsADirectoryError: The name is a directory, or another file that cannot be an object.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise IsADirectoryError(errno.EISDIR, "the path is not a regular file", path)
    status = temporary.stat()
    try:
        temporary.replace(path)
    except FileNotFoundError:
        # NFS may repeat a rename after a lost response: then `path` already is this file.
        if not _is_same(status, path):
            raise
    sync_directory(path.parent)


def _is_same(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, path.lstat())
    except FileNotFoundError:
        return False
