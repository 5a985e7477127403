"""Local files: names of temporary files, and reads and writes of whole files.

bytes -> .aioflux-<random> in the same directory -> rename
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TEMPORARY = ".aioflux-"
"""Prefix of local file names that is reserved for unfinished writes and locks."""
_WRITE_BYTES = 128 * 1024
"""Most bytes of one `write`. For larger ones, ext4 takes large blocks of new memory for its cache;
on virtual machines, which return free memory to their host, they took three times as long."""
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + r"(lock-|partial-)?[0-9a-f]{32}")


class FileChangedError(ValueError):
    """A file changed while it was copied. Callers see ValueError."""


def is_temporary(name: str) -> bool:
    """Return whether a local file name has the form of the temporary files of unfinished writes."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


@contextmanager
def errors_name(path: str) -> Iterator[None]:
    """Let every OSError of the `with` block name this path, which the caller has given."""
    try:
        yield
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, path) from exc


def mode_of_target(path: str) -> int | None:
    """Return the mode of a file that will be replaced; None if there is none.

    Raises:
        ValueError: The path exists and is not a regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        raise ValueError(
            f"cannot write {path}: it is a directory where this object needs a file; copy one of "
            "the two elsewhere"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(f"cannot write {path}: it is not a regular file")
    return mode & 0o777


def create_file(path: str, mode: int | None) -> int:
    """Create a file; `mode` is the mode of the file to overwrite, None if there is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if mode is None:
        return os.open(path, flags, 0o666)
    # Created with `mode`, and not with 0o666, the file is never readable by more users than the
    # old one. `fchmod` sets the bits that the umask removed.
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


def remove_file(path: str) -> None:
    """Remove a file; a missing one is no error."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def open_regular(path: str) -> int:
    """Open a regular file for reading.

    Raises:
        ValueError: The path is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"cannot read {path}: it is not a regular file")
    return descriptor


def fill(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill memory from `offset` on; return the number of bytes, fewer only at the end."""
    done = 0
    while done < buffer.nbytes:
        num_read = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not num_read:
            break
        done += num_read
    return done


def write_all(
    descriptor: int, data: bytes | bytearray | memoryview, offset: int | None = None
) -> None:
    """Write all bytes, at an offset or at the position of the descriptor."""
    view = memoryview(data)
    while view.nbytes:
        if offset is None:
            num_written = os.write(descriptor, view[:_WRITE_BYTES])
        else:
            num_written = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
            offset += num_written
        view = view[num_written:]


def is_same(before: os.stat_result, after: os.stat_result) -> bool:
    """Return whether a file was not changed between two calls of `stat`."""
    return (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def reject_changed(path: str, before: os.stat_result, after: os.stat_result, num_read: int) -> None:
    """Raise FileChangedError if a file changed while `num_read` bytes were read, to its end."""
    if not is_same(before, after) or num_read != before.st_size:
        text = f"could not read {path}: it changed while it was read; copy it again"
        raise FileChangedError(text)
