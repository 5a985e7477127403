"""Entries of a cache: files that are complete or missing, and are verified when they are read.

An entry contains the bytes of an object, followed by a footer. So one `os.read` with the size of
the object returns its bytes without the footer. The bytes after a header would have to be copied,
and allocating and freeing two buffers costs more than the read itself.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import google_crc32c

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

Entry = tuple[int, int, str]
"""Modification time in nanoseconds, size in bytes, path."""

_FOOTER = struct.Struct("<8sQI")
_MAGIC = b"aioflux2"
FOOTER_BYTES = _FOOTER.size
"""Size of the footer."""

_UNFINISHED = "~"
"""First character of the name of an entry that is being written."""
_IMPORT_ID = os.urandom(8).hex()
"""Part of temporary names that differs between containers and machines. Forked processes have the
same value, so names also contain the process id, and the time because process ids are reused."""
_numbers = count()
_READ_BYTES = 1 << 30
"""Largest size of one read: Linux returns at most 2 GiB - 4 KiB."""
_MTIME_PRECISION_NS = 10 * 10**9
"""Time between two updates of an entry's mtime. An eviction needs no finer order, and an update
would cost each hit a system call."""
# With O_NONBLOCK, opening a named pipe at the path of an entry does not block.
_FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FOR_WRITING = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class DamagedError(Exception):
    """An entry is incomplete or does not contain the bytes of its object."""


def read_entry(path: str, meta: ObjectMeta) -> bytes | None:
    """Return the verified bytes of an object, and update the mtime of the entry.

    Returns:
        The bytes; None if the path is not a regular file.

    Raises:
        DamagedError: The entry is incomplete or does not contain the bytes of its object.
        OSError: The entry cannot be read; FileNotFoundError if it is missing.
    """
    file = os.open(path, _FOR_READING)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size != meta.size + FOOTER_BYTES:
            raise DamagedError(f"it does not have the expected {meta.size} bytes")
        data = _read(file, meta.size)
        # The checksum of the listing saves reading the footer.
        expected = _stored_checksum(file, meta) if meta.crc32c is None else meta.crc32c
        if len(data) != meta.size or google_crc32c.value(data) != expected:
            raise DamagedError("its bytes do not match their checksum")
        now = time.time_ns()
        if now - status.st_mtime_ns > _MTIME_PRECISION_NS:
            with suppress(OSError):  # a read-only cache works without updates
                os.utime(file, ns=(now, now))
        return data
    finally:
        os.close(file)


def _read(file: int, size: int) -> bytes:
    if size <= _READ_BYTES:
        return os.read(file, size)
    pieces = []
    while size and (piece := os.read(file, min(size, _READ_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _stored_checksum(file: int, meta: ObjectMeta) -> int:
    footer = os.read(file, FOOTER_BYTES)
    if len(footer) < FOOTER_BYTES:
        raise DamagedError("it is truncated")
    magic, size, checksum = _FOOTER.unpack(footer)
    if magic != _MAGIC or size != meta.size:
        raise DamagedError("its footer is not valid")
    return int(checksum)


def write_entry(path: str, content: bytes, checksum: int) -> None:
    """Write an entry under a temporary name in its directory, and rename it.

    With one directory for all temporary files, ext4 took four times as long to create them.
    """
    footer = _FOOTER.pack(_MAGIC, len(content), checksum)
    parent = os.path.dirname(path)
    temporary = f"{parent}/{new_name()}"
    try:
        file = os.open(temporary, _FOR_WRITING, 0o600)
    except FileNotFoundError:  # the first entry of this directory
        os.makedirs(parent, mode=0o700, exist_ok=True)
        file = os.open(temporary, _FOR_WRITING, 0o600)
    try:
        try:
            _write(file, content, footer)
        finally:
            os.close(file)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _write(file: int, content: bytes, footer: bytes) -> None:
    written = os.writev(file, (content, footer))
    if written == len(content) + len(footer):
        return
    view = memoryview(content)
    while written < len(content):
        written += os.write(file, view[written : written + _READ_BYTES])
    rest = footer[written - len(content) :]
    while rest:
        rest = rest[os.write(file, rest) :]


def new_name() -> str:
    """Return a unique name for an unfinished file."""
    return f"{_UNFINISHED}{_IMPORT_ID}-{os.getpid()}-{time.time_ns()}-{next(_numbers)}"


def is_unfinished(entry: Entry) -> bool:
    """Return whether an entry is being written, or its process died while writing it."""
    return os.path.basename(entry[2]).startswith(_UNFINISHED)


def _files(directory: str) -> Iterator[Entry]:
    """Yield the files of a directory, except files that are deleted meanwhile."""
    try:
        scan = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with scan:
        for file in scan:
            with suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                # The cache creates regular files only; `unlink` fails for directories.
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime_ns, status.st_size, file.path


def entries_below(directory: str) -> Iterator[Entry]:
    """Yield all entries, including unfinished entries."""
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            yield from _files(os.path.join(directory, name))


def oldest(entries: Iterable[Entry], num_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield path and size of the oldest entries, until the sizes add up to `num_bytes`."""
    for _, size, path in sorted(entries):
        if num_bytes <= 0:
            return
        num_bytes -= size
        yield path, size
