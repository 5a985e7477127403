"""Files that become visible whole, on local file systems and on NFS.

    temporary name beside the target -> bytes -> fsync -> lock -> link or rename -> fsync directory

A killed writer leaves its temporary, or an empty lock, under a name that no listing shows.

On NFS all of this holds between machines that mount with the defaults. One read is of one file,
which may have been replaced up to `acregmax` seconds ago (60 by default): by name, another
machine's last write may not be seen yet, as its old bytes, whole. A file that is gone under a read
is a stale handle (ESTALE): it is read again, and is a NotFoundError where its generation was asked
for. The lock that a conditional write takes makes a file in the directory of the object, which
brings what is known of that directory up to date; mounted with `nolock` or `local_lock`, machines
are not kept apart. Links and renames that a server was sent twice, since its first answer was lost,
are known for what they are, and so are deletes. What a full server says at fsync is said before
anything is visible. Names that clients of NFS give to files deleted while open (`.nfs` and digits)
are no keys.
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
"""Time to the second look at a lock that another writer holds. It doubles from look to look; a
writer holds it for one rename and one sync of a directory."""

_MAX_LOCK_SECONDS = 0.02
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def new_temporary(path: Path, root: Path) -> Path:
    """Make an empty file beside a path, and the directories above it; they are durable then."""
    temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        for attempt in range(_MAX_DIRECTORY_RACES):
            try:
                _make_directories(path.parent)
                temporary.touch(exist_ok=False)
                break
            except (FileNotFoundError, FileExistsError):
                # A delete of the last object in a directory removes it, here between two lines.
                if attempt == _MAX_DIRECTORY_RACES - 1 or _is_blocked(path.parent):
                    raise
    except OSError:
        prune(temporary, root)
        raise
    return temporary


def _is_blocked(directory: Path) -> bool:
    """Judge whether something that is no directory is in the way of one."""
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
    """Remove the directories that held nothing but this: a bucket has no directories."""
    for parent in path.parents:
        if parent == root or not parent.is_relative_to(root):
            break
        try:
            parent.rmdir()
        except OSError as exc:
            # Never made, or gone: its parent may be empty, too.
            if exc.errno not in {errno.ENOENT, errno.ENAMETOOLONG}:
                break


def write_all(
    descriptor: int, data: bytes | memoryview, offset: int, stop: Stop, checksum: int = 0
) -> int:
    """Write all of `data` at `offset`, and return its crc32c, going on from `checksum`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < view.nbytes:
        stop.check()
        num_written = os.pwrite(descriptor, view[done : done + BLOCK_BYTES], offset + done)
        checksum = crc32c(view[done : done + num_written], checksum)
        done += num_written
    return checksum


def finish(descriptor: int, checksum: int | None) -> os.stat_result:
    """Stamp and sync a file that is about to become visible, and return its status.

    The kernel stamps with a clock that ticks every 4 ms: an inode number that is given out again
    within one tick would repeat a generation.

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
    """Make a rename durable: the directory entry is data of its own."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a file system that has nothing to sync here
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, stop: Stop, *, required: bool = False) -> Iterator[None]:
    """Keep the writers of one object apart, in all processes of all machines.

    The lock is the kernel's, so that a killed holder gives it back; its file goes with it. One that
    is stopped keeps it, so the wait ends with the work.

    Args:
        path: Where the object is; its directory exists.
        stop: Of the work that waits.
        required: Fail on a file system that has no locks, rather than go on without.
    """
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=16).hexdigest()
    lock = path.with_name(f"{TEMPORARY}lock-{name}")
    descriptor = _lock(lock, stop, required=required)
    try:
        yield
    finally:
        if descriptor is not None:
            # Removed first: who waits for it finds out that it is no longer this one.
            lock.unlink(missing_ok=True)
            # Said, not left to `close`: a child that was forked meanwhile holds it open, too.
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
                raise  # the file stays: it is the lock of whoever holds it
            lock.unlink(missing_ok=True)
            if required:
                raise
            return None
        os.close(descriptor)


def _wait_for(descriptor: int, stop: Stop) -> None:
    """Take a lock. The kernel's own wait would keep the thread, and with it the process."""
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
    """Give a file a second name that nobody has.

    Raises:
        FileExistsError: Somebody has.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS sends a link again where the answer to the first was lost.
        if not _is_same(temporary.stat(), path):
            raise
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        # A file system without links: the lock alone keeps writers apart.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from exc
        temporary.replace(path)
    sync_directory(path.parent)


def replace_file(temporary: Path, path: Path) -> None:
    """Give a file the name of another, or of none.

    Raises:
        IsADirectoryError: There is a directory, or something else that is no object.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise IsADirectoryError(errno.EISDIR, "something that is no object is there", path)
    status = temporary.stat()
    try:
        temporary.replace(path)
    except FileNotFoundError:
        # NFS sends a rename again where the answer to the first was lost.
        if not _is_same(status, path):
            raise
    sync_directory(path.parent)


def _is_same(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, path.lstat())
    except FileNotFoundError:
        return False
