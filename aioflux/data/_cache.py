"""Cache: bytes of objects on a local disk, shared by processes and runs, bounded, least used first.

    <directory>/objects/ab/cdef...   one entry: header, data; its mtime is the time of its last use
               /objects/ab/~...      an entry being written; renamed into place when whole
               /ledger               8 bytes for every change of the bytes in `objects`
               /lock                 held by whoever evicts; never waited for

An entry is there whole or not at all, because it is renamed into place, and is read only where its
checksum holds: no moment of a SIGKILL leaves one that lies. What is lost with the machine's power
is found by the checksum. Nobody waits for a lock: who finds it held does without.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
import time
from array import array
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c

from aioflux._errors import ChecksumError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aioflux._meta import ObjectMeta

__all__ = ["Cache"]

_log = logging.getLogger("aioflux")

_HEADER = struct.Struct("<8sQI")
_MAGIC = b"aioflux1"
_CHANGE = struct.Struct("<q")
_MEASURED = -(1 << 62)
"""Stands first in a ledger that begins with a sum that was measured, and not with a directory of
which nobody knows what it holds."""

_KEPT_SHARE = 0.9
"""What an eviction leaves of the bound: it looks at every entry, which 3 us each would make dear
if it were done for every object that comes in."""
_UNFINISHED = "~"
"""Begins the name of an entry that is being written."""
_LEFT_OVER_NS = 900 * 10**9
"""Age at which an unfinished entry is taken for that of a process that died."""
_ROOM_STEPS = 1024
"""Parts of the bound of which a process takes one at once: the ledger costs four system calls, and
each of them 0.3 ms where another thread waits for the interpreter."""
_PAUSE_SECONDS = 30.0
"""Time for which nothing is stored after the disk has refused."""
_COPIED_BYTES = 1 << 18
"""Entries up to this size are read by one system call and copied once."""
_READ_BYTES = 1 << 30
"""The most that is asked of one read: Linux returns 2 GiB less 4 KiB at most."""

_Entry = tuple[int, int, str]
"""mtime in nanoseconds, size, path."""


class Cache:
    """Objects on a local disk, by uri and generation.

    The directory may be shared by any number of processes and runs, also by such with another
    `max_bytes`; each keeps to its own. Entries that were used least recently go first. What cannot
    be stored, because the disk is full or another process is making room just then, is not stored:
    a warning of the logger "aioflux" tells of a disk that refuses. Objects whose service gives them
    neither a generation nor an etag are not kept, since nothing would tell a changed one.

    Use a local directory: on a network file system a hit would be a transfer again.

    It pickles and forks as its settings; files are opened as they are needed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int) -> None:
        """Open a cache, and make its directory where there is none.

        Args:
            directory: Where it is, on a local disk.
            max_bytes: The most that its entries take, in bytes; the file system's own needs, such
                as whole blocks, come on top.

        Raises:
            OSError: The directory cannot be made.
            ValueError: `max_bytes` is not above 0.
        """
        if max_bytes <= 0:
            raise ValueError(f"max_bytes of a cache must be above 0, not {max_bytes!r}")
        self.directory = os.path.abspath(os.fspath(directory))
        self.max_bytes = max_bytes
        self._prepare()
        self._start()

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.directory, self.max_bytes)

    def __repr__(self) -> str:
        return f"<Cache {self.directory}, {self.max_bytes:,} bytes at most>"

    def _prepare(self) -> None:
        # What the objects hold may be for the eyes of few.
        os.makedirs(self._in("objects", "00"), mode=0o700, exist_ok=True)

    def _start(self) -> None:
        self._ledger = _Ledger(self._in("ledger"), self._in("objects", "00"))
        self._room, self._pid = 0, os.getpid()
        self._paused_until = 0.0

    def _in(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    def _path(self, meta: ObjectMeta) -> str | None:
        identity = meta.generation or meta.etag
        if not identity:
            return None
        text = f"{meta.uri}\0{identity}".encode("utf-8", "surrogatepass")
        name = hashlib.sha256(text).hexdigest()
        return self._in("objects", name[:2], name[2:])

    def has(self, meta: ObjectMeta) -> bool:
        """Tell whether an object is here, by its name alone: only `get` knows whether it is whole.

        For those who look ahead: about 3 us.
        """
        path = self._path(meta)
        return path is not None and os.path.exists(path)

    def get(self, meta: ObjectMeta) -> bytes | None:
        """Return the bytes of an object, verified, or None where they are not here.

        An entry that is damaged is dropped, and a warning tells of it.
        """
        path = self._path(meta)
        if path is None:
            return None
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as exc:
            self._tell(f"cannot read {path}", exc)
            return None
        try:
            data = _read_entry(file, meta)
        except _DamagedError as exc:
            _log.warning("the cache's copy of %s is dropped: %s (%s)", meta.uri, exc, path)
            self._remove(path)
            return None
        except OSError as exc:
            self._tell(f"cannot read {path}", exc)
            return None
        else:
            now = time.time_ns()
            with suppress(OSError):  # a cache that may only be read still serves
                os.utime(file, ns=(now, now))
            return data
        finally:
            os.close(file)

    def put(self, meta: ObjectMeta, data: bytes | bytearray | memoryview) -> bool:
        """Keep the bytes of an object, and make room for them.

        Returns:
            Whether they are kept.

        Raises:
            ChecksumError: They are not what the metadata says of the object.
        """
        content = data if isinstance(data, bytes) else bytes(data)
        path = self._path(meta)
        size = _HEADER.size + len(content)
        if path is None or size > self.max_bytes or time.monotonic() < self._paused_until:
            return False
        checksum = int(google_crc32c.value(content))
        expected = checksum if meta.crc32c is None else meta.crc32c
        if len(content) != meta.size or checksum != expected:
            raise ChecksumError(
                f"{meta.uri} is not cached: {len(content)} bytes with crc32c {checksum:#010x} are "
                f"not the {meta.size} bytes with crc32c {expected:#010x} that it has; read it "
                "again",
                uri=meta.uri,
            )
        header = _HEADER.pack(_MAGIC, len(content), checksum)
        try:
            try:
                return self._keep(path, header, content)
            except FileNotFoundError:  # somebody has removed the directory
                self._prepare()
                return self._keep(path, header, content)
        except OSError as exc:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            self._tell(f"stores nothing for the next {_PAUSE_SECONDS:.0f} seconds", exc)
            return False

    def _tell(self, what: str, error: OSError) -> None:
        _log.warning("the cache in %s %s: %s", self.directory, what, error)

    def _keep(self, path: str, header: bytes, content: bytes) -> bool:
        size = len(header) + len(content)
        if not self._has_room(size):
            return False
        try:
            self._store(path, header, content)
        except BaseException:
            self._room += size
            raise
        return True

    def _store(self, path: str, header: bytes, content: bytes) -> None:
        # Beside its place: in a directory of their own ext4 took four times as long to begin them.
        incoming = os.path.join(os.path.dirname(path), _new_name())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(incoming, flags, 0o600)
        except FileNotFoundError:  # the first with these two letters
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            file = os.open(incoming, flags, 0o600)
        try:
            try:
                _write_all(file, (header, content))
            finally:
                os.close(file)
            os.replace(incoming, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(incoming)
            raise

    def _has_room(self, size: int) -> bool:
        """Take room for `size` bytes, removing others where there is too little; tell whether."""
        if self._pid != os.getpid():  # a forked child has none of its parent's room
            self._room, self._pid = 0, os.getpid()
        if size > self._room:
            step = max(size, self.max_bytes // _ROOM_STEPS)
            if not self._takes_room(step):
                return False
            self._room += step
        self._room -= size
        return True

    def _takes_room(self, size: int) -> bool:
        # Taken before it is looked at, so that of two processes at the last gap not both fill it.
        total = self._ledger.take(size)
        if self._ledger.is_measured and total <= self.max_bytes:
            return True
        with self._evicting() as is_mine:
            if is_mine:
                self._evict(size)
                return True
        # Somebody else is at it, and more must not come in meanwhile than is known to fit.
        if total <= self.max_bytes:
            return True
        self._ledger.add(-size)
        return False

    @contextmanager
    def _evicting(self) -> Iterator[bool]:
        """Take the lock where it is free; the kernel gives back that of a process that dies.

        A lock of `lockf` is not inherited by children, which would go on holding that of `flock`.
        """
        file = os.open(self._in("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX allows either
                yield False
            else:
                yield True
        finally:
            os.close(file)

    def _evict(self, size: int) -> None:
        """Measure what there is, and remove what was used least recently until `size` fits."""
        oldest_ns = time.time_ns() - _LEFT_OVER_NS
        total, entries = 0, []
        for entry in _entries(self._in("objects")):
            mtime_ns, num_bytes, path = entry
            if not os.path.basename(path).startswith(_UNFINISHED):
                entries.append(entry)
            elif mtime_ns < oldest_ns:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                continue
            total += num_bytes
        if total + size > self.max_bytes:
            room = max(0, min(int(self.max_bytes * _KEPT_SHARE), self.max_bytes - size))
            for path, num_bytes in _oldest(entries, total - room):
                with suppress(FileNotFoundError):  # its reader found it damaged
                    os.unlink(path)
                total -= num_bytes
        self._ledger.restart(total + size)

    def _remove(self, path: str) -> None:
        with suppress(OSError):  # gone, or it cannot be removed: it is no hit either way
            num_bytes = os.stat(path).st_size
            os.unlink(path)
            self._ledger.add(-num_bytes)


def _restore(directory: str, max_bytes: int) -> Cache:
    return Cache(directory, max_bytes=max_bytes)


class _DamagedError(Exception):
    """An entry is not what was stored."""


def _read_entry(file: int, meta: ObjectMeta) -> bytes:
    size = meta.size
    # One byte more than there should be, to see what is too long.
    begin = os.read(file, _HEADER.size + (size + 1 if size <= _COPIED_BYTES else 0))
    if len(begin) < _HEADER.size:
        raise _DamagedError("it is shorter than its header")
    magic, stored_size, checksum = _HEADER.unpack_from(begin)
    if magic != _MAGIC:
        raise _DamagedError("it does not begin as entries do")
    if stored_size != size or (meta.crc32c is not None and checksum != meta.crc32c):
        raise _DamagedError("it is of other bytes than the object has")
    data = begin[_HEADER.size :] if size <= _COPIED_BYTES else _read_up_to(file, size + 1)
    if len(data) != size:
        raise _DamagedError(f"it has not the {size} bytes that it should have")
    if google_crc32c.value(data) != checksum:
        raise _DamagedError("its bytes do not match their checksum")
    return data


def _read_up_to(file: int, size: int) -> bytes:
    pieces = []
    while size and (piece := os.read(file, min(size, _READ_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _new_name() -> str:
    """Return a name of its own, also in a child that was forked in the middle of a write."""
    return f"{_UNFINISHED}{os.getpid()}-{os.urandom(8).hex()}"


def _write_all(file: int, pieces: tuple[bytes, bytes]) -> None:
    header, content = pieces
    written = os.writev(file, pieces)
    if written < len(header):
        os.write(file, header[written:])
        written = len(header)
    view = memoryview(content)[written - len(header) :]
    while view:
        view = view[os.write(file, view[:_READ_BYTES]) :]


def _files(directory: str) -> Iterator[_Entry]:
    """Yield what lies in a directory, as far as it stays there meanwhile."""
    try:
        found = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with found:
        for each in found:
            with suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                yield status.st_mtime_ns, status.st_size, each.path


def _entries(directory: str) -> Iterator[_Entry]:
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            yield from _files(os.path.join(directory, name))


def _oldest(entries: Iterable[_Entry], num_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield the paths and sizes of the entries that to remove frees so many bytes, oldest first."""
    for _, size, path in sorted(entries):
        if num_bytes <= 0:
            return
        num_bytes -= size
        yield path, size


class _Ledger:
    """What the entries take together, as all processes tell it: 8 bytes a change, appended.

    To append is atomic, so that no change is lost; an eviction begins it anew with what it has
    measured. It may say a little too much or too little, by what was under way just then or when a
    process died; the next eviction puts that right.
    """

    def __init__(self, path: str, incoming: str) -> None:
        self._path = path
        self._incoming = incoming
        self._file: int | None = None
        self._num_opened = 0
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._at = 0
        self._total = 0
        self.is_measured = False

    def __del__(self) -> None:
        self._forget()

    def _opened(self) -> int:
        """Return the ledger that stands at its place now."""
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._forget()
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            self._num_opened += 1
        return self._file

    def take(self, num_bytes: int) -> int:
        """Tell a change, and return the sum of what was told so far."""
        while True:
            self.add(num_bytes)
            number, total = self._num_opened, self._read()
            if number == self._num_opened:
                return total
            # It was begun anew in between, perhaps without this change.

    def add(self, num_bytes: int) -> None:
        """Tell a change."""
        os.write(self._opened(), _CHANGE.pack(num_bytes))

    def _read(self) -> int:
        file = self._opened()
        while told := os.pread(file, 1 << 16, self._at):
            changes = array("q", told[: len(told) - len(told) % _CHANGE.size])
            if not changes:
                break
            if not self._at and changes[0] == _MEASURED:
                self.is_measured = True
                changes[0] = 0
            self._total += sum(changes)
            self._at += len(changes) * _CHANGE.size
        return self._total

    def restart(self, total: int) -> None:
        """Begin anew with a sum that was measured."""
        fresh = os.path.join(self._incoming, _new_name())
        Path(fresh).write_bytes(_CHANGE.pack(_MEASURED) + _CHANGE.pack(total))
        os.replace(fresh, self._path)
        self._forget()
