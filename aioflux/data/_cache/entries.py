"""Entries of a cache: files that are whole or missing, and are verified when they are read.

An entry is the object's bytes with a footer behind them, so that one call reads the bytes into
memory of exactly their size: a slice would be one more copy, and allocating and freeing memory for
both costs more than the read itself.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aioflux._values.meta import ObjectMeta

__all__ = [
    "FOOTER_BYTES",
    "DamagedError",
    "Entry",
    "entries_below",
    "is_unfinished",
    "new_name",
    "oldest",
    "read_entry",
    "write_entry",
]

Entry = tuple[int, int, str]
"""mtime in nanoseconds, size, path."""

_FOOTER = struct.Struct("<8sQI")
_MAGIC = b"aioflux2"
FOOTER_BYTES = _FOOTER.size
"""Size of an entry beyond the object's bytes."""

_UNFINISHED = "~"
"""First character of the name of an entry that is being written."""
_IMPORT_ID = os.urandom(8).hex()
"""Distinguishes processes of other containers and machines. Forked processes share it, and differ
in their id and in the time, since ids are used again."""
_numbers = count()
_READ_BYTES = 1 << 30
"""Bytes of one read, at most: Linux returns 2 GiB less 4 KiB at most."""
_MTIME_PRECISION_NS = 10 * 10**9
"""Time between two updates of an entry's time of use: the order within seconds matters little, and
an update costs each hit a system call."""
# Without O_NONBLOCK, a pipe in the place of an entry would block.
_FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FOR_WRITING = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class DamagedError(Exception):
    """An entry differs from what was stored."""


def read_entry(path: str, meta: ObjectMeta) -> bytes | None:
    """Return the object's bytes, verified, and update their time of use.

    Returns:
        None if the path is not a file.

    Raises:
        DamagedError: It is of another object, or not whole.
        OSError: It cannot be read; FileNotFoundError if there is none.
    """
    file = os.open(path, _FOR_READING)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size != meta.size + FOOTER_BYTES:
            raise DamagedError(f"it does not have the expected {meta.size} bytes")
        data = _read(file, meta.size)
        # The checksum of the listing is as good as that of the entry.
        expected = _stored_checksum(file, meta) if meta.crc32c is None else meta.crc32c
        if len(data) != meta.size or google_crc32c.value(data) != expected:
            raise DamagedError("its bytes do not match their checksum")
        now = time.time_ns()
        if now - status.st_mtime_ns > _MTIME_PRECISION_NS:
            with suppress(OSError):  # a read-only cache still works
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
        raise DamagedError("its footer is no footer of an entry")
    return int(checksum)


def write_entry(path: str, content: bytes, checksum: int) -> None:
    """Write an entry beside its path, and rename it.

    In a directory of their own, ext4 took four times as long to create them.
    """
    footer = _FOOTER.pack(_MAGIC, len(content), checksum)
    parent = os.path.dirname(path)
    incoming = f"{parent}/{new_name()}"
    try:
        file = os.open(incoming, _FOR_WRITING, 0o600)
    except FileNotFoundError:  # the first entry of this directory
        os.makedirs(parent, mode=0o700, exist_ok=True)
        file = os.open(incoming, _FOR_WRITING, 0o600)
    try:
        try:
            _write(file, content, footer)
        finally:
            os.close(file)
        os.rename(incoming, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(incoming)
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
    """Return whether an entry is being written, or was when its process died."""
    return os.path.basename(entry[2]).startswith(_UNFINISHED)


def _files(directory: str) -> Iterator[Entry]:
    """Yield the files of a directory, except those removed meanwhile."""
    try:
        found = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with found:
        for each in found:
            with suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                # Anything else is not the cache's, and could not be unlinked.
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime_ns, status.st_size, each.path


def entries_below(directory: str) -> Iterator[Entry]:
    """Yield all entries, unfinished ones among them."""
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            yield from _files(os.path.join(directory, name))


def oldest(entries: Iterable[Entry], num_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield paths and sizes of the oldest entries, until they add up to `num_bytes`."""
    for _, size, path in sorted(entries):
        if num_bytes <= 0:
            return
        num_bytes -= size
        yield path, size
