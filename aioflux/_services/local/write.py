"""Files that become visible whole, on local file systems and on NFS.

    temporary name beside the target -> bytes -> fsync -> lock -> link or rename -> fsync directory

A killed writer leaves its temporary file, or an empty lock, under a name that no listing shows.

On NFS all of this holds between machines that mount with the defaults. A read by name may return
the old bytes, whole, of an object that another machine replaced up to `acregmax` seconds ago (60 by
default). A file that is removed during a read is a stale handle (ESTALE): it is read again, and is
a NotFoundError if the read has a generation. The lock of a conditional write creates a file in the
directory of the object, which refreshes the cached directory; with the mount options `nolock` or
`local_lock`, the lock has no effect between machines. Links, renames and deletes that NFS repeats
after a lost response are recognized. A full server reports it at fsync, before anything is visible.
Names that NFS clients give to files deleted while open (`.nfs` and digits) are not keys.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aioflux._services.local.checksums import record_checksum
from aioflux._services.local.threads import BLOCK_BYTES
from aioflux._services.local.walk import TEMPORARY
from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux._services.local.threads import Stop

__all__ = [
    "finish",
    "link_new",
    "locked",
    "new_temporary",
    "prune",
    "replace_file",
    "write_all",
]

_MAX_DIRECTORY_RACES = 100
_LOCK_SECONDS = 0.0005
"""Interval of polling a lock that another writer holds, doubled each time; it is held for one
rename and one sync of a directory."""

_MAX_LOCK_SECONDS = 0.02
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def new_temporary(path: Path, root: Path) -> Path:
    """Create an empty file beside a path, and the directories above it, durably."""
    temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        for attempt in range(_MAX_DIRECTORY_RACES):
            try:
                _make_directories(path.parent)
                temporary.touch(exist_ok=False)
                break
            except (FileNotFoundError, FileExistsError):
                # A delete of the last object in a directory removes it, maybe just now.
                if attempt == _MAX_DIRECTORY_RACES - 1 or _is_blocked(path.parent):
                    raise
    except OSError:
        prune(temporary, root)
        raise
    return temporary


def _is_blocked(directory: Path) -> bool:
    """Return whether a file is in the place of one of the directories."""
    for each in (directory, *directory.parents):
        try:
            if not stat.S_ISDIR(each.stat().st_mode):
                return True
        except FileNotFoundError:
            if each.is_symlink():
                return True
    return False


def _make_directories(directory: Path) -> None:
    missing: list[Path] = []
    for each in (directory, *directory.parents):
        if each.is_dir():
            break
        missing.append(each)
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir()
            sync_directory(each.parent)


def prune(path: Path, root: Path) -> None:
    """Remove the directories above a path that are empty: a bucket has no directories."""
    for parent in path.parents:
        if parent == root or not parent.is_relative_to(root):
            break
        try:
            parent.rmdir()
        except OSError as exc:
            # Never created, or removed: its parent may be empty, too.
            if exc.errno not in {errno.ENOENT, errno.ENAMETOOLONG}:
                break


def write_all(
    descriptor: int, data: bytes | memoryview, offset: int, stop: Stop, checksum: int = 0
) -> int:
    """Write all of `data` at `offset`, and return its crc32c, continued from `checksum`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < view.nbytes:
        stop.check()
        num_written = os.pwrite(descriptor, view[done : done + BLOCK_BYTES], offset + done)
        checksum = crc32c(view[done : done + num_written], checksum)
        done += num_written
    return checksum


def finish(descriptor: int, checksum: int | None) -> os.stat_result:
    """Set the time of a file, sync it, and return its status.

    The kernel's own timestamps change every 4 ms: an inode that is reused within that time would
    repeat a generation.

    Args:
        descriptor: The file, open for writing.
        checksum: CRC32C of its content, which is recorded with it; None if it is not known.
    """
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))
    if checksum is not None:
        record_checksum(descriptor, os.fstat(descriptor), checksum)
    os.fsync(descriptor)
    return os.fstat(descriptor)


def sync_directory(path: Path) -> None:
    """Make a rename durable, which fsync of the file does not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a file system without sync of directories
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, stop: Stop, *, required: bool = False) -> Iterator[None]:
    """Hold the lock of an object, in all processes of all machines.

    The kernel releases the lock of a killed process. A suspended process keeps it, so `stop` ends
    the wait.

    Args:
        path: Path of the object; its directory exists.
        stop: Ends the wait.
        required: Raise on a file system without locks, rather than continue without.
    """
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=16).hexdigest()
    lock = path.with_name(f"{TEMPORARY}lock-{name}")
    descriptor = _lock(lock, stop, required=required)
    try:
        yield
    finally:
        if descriptor is not None:
            # Removed first, so that a waiting writer opens the new file.
            lock.unlink(missing_ok=True)
            # Not by `close` alone: a child that was forked meanwhile has it open, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(lock: Path, stop: Stop, *, required: bool) -> int | None:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _wait_for(descriptor, stop)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    return descriptor
        except OSError as exc:
            os.close(descriptor)
            if exc.errno not in _NO_LOCKS:
                raise  # the file stays: another writer may hold the lock
            lock.unlink(missing_ok=True)
            if required:
                raise
            return None
        os.close(descriptor)


def _wait_for(descriptor: int, stop: Stop) -> None:
    """Acquire a lock by polling, since the kernel's wait could not be cancelled."""
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
    """Link a file to a new name.

    Raises:
        FileExistsError: The name exists.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a link after a lost response.
        if not _is_same(temporary.stat(), path):
            raise
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        # A file system without links: writers are excluded by the lock alone.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from exc
        temporary.replace(path)
    sync_directory(path.parent)


def replace_file(temporary: Path, path: Path) -> None:
    """Rename a file, replacing the object of that name.

    Raises:
        IsADirectoryError: The name is a directory, or something else that is not an object.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise IsADirectoryError(errno.EISDIR, "the name is not that of an object", path)
    status = temporary.stat()
    try:
        temporary.replace(path)
    except FileNotFoundError:
        # NFS repeats a rename after a lost response.
        if not _is_same(status, path):
            raise
    sync_directory(path.parent)


def _is_same(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, path.lstat())
    except FileNotFoundError:
        return False
