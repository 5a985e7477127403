"""Cache: bytes of objects on a local disk, shared by processes and runs, bounded, least used first.

    <directory>/objects/ab/cdef...   one entry: data, footer; its mtime is the time of its last use,
                                 as far as that is known to ten seconds
               /objects/ab/~...      an entry being written; renamed into place when whole
               /ledger               8 bytes for every change of the bytes in `objects`
               /lock                 held by whoever evicts; never waited for

An entry is there whole or not at all, because it is renamed into place, and is read only where its
checksum holds: no moment of a SIGKILL leaves one that lies. What is lost with the machine's power
is found by the checksum. No process waits for another: who finds the lock held does without.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import google_crc32c

from aioflux._bridge import OwnLock
from aioflux.data._cache.entries import (
    FOOTER_BYTES,
    DamagedError,
    entries_below,
    is_unfinished,
    oldest,
    read_entry,
    write_entry,
)
from aioflux.data._cache.ledger import Ledger
from aioflux.errors import ChecksumError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux._values.meta import ObjectMeta

__all__ = ["Cache"]

_log = logging.getLogger("aioflux")

_KEPT_SHARE = 0.9
"""What an eviction leaves of the bound: it looks at every entry, which 3 us each would make dear
if it were done for every object that comes in."""
_LEFT_OVER_NS = 900 * 10**9
"""Age at which an unfinished entry is taken for that of a process that died."""
_ROOM_STEPS = 1024
"""Parts of the bound of which a process takes one at once: the ledger costs four system calls, and
each of them 0.3 ms where another thread waits for the interpreter."""
_PAUSE_SECONDS = 30.0
"""Time for which nothing is stored after the disk has refused."""
_MAX_OBSTRUCTED = 64
"""Places that something else takes, beyond which the directory is taken for one that refuses."""


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
        self._objects = self._in("objects")
        self._lock = OwnLock()  # of the ledger and of the room that was taken there
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
        """Begin as a process does that has just opened it, or that was forked just now."""
        self._ledger = Ledger(self._in("ledger"), self._in("objects", "00"))
        self._room, self._pid = 0, os.getpid()
        self._paused_until = self._told_until = 0.0
        self._obstructed: set[str] = set()

    def _in(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    def _path(self, meta: ObjectMeta) -> str | None:
        identity = meta.generation or meta.etag
        if not identity:
            return None
        text = f"{meta.uri}\0{identity}".encode("utf-8", "surrogatepass")
        name = hashlib.sha256(text).hexdigest()
        return f"{self._objects}/{name[:2]}/{name[2:]}"

    def has(self, meta: ObjectMeta) -> bool:
        """Tell whether an object is here, by its name alone: only `get` knows whether it is whole.

        For those who look ahead: about 5 us.
        """
        path = self._path(meta)
        return path is not None and os.access(path, os.F_OK)

    def get(self, meta: ObjectMeta) -> bytes | None:
        """Return the bytes of an object, verified, or None where they are not here.

        An entry that is damaged is dropped, and a warning tells of it.
        """
        path = self._path(meta)
        if path is None:
            return None
        try:
            return read_entry(path, meta)
        except FileNotFoundError:
            return None
        except DamagedError as exc:
            _log.warning("the cache's copy of %s is dropped: %s (%s)", meta.uri, exc, path)
            self._remove(path)
            return None
        except OSError as exc:
            self._tell_unreadable(path, exc)
            return None

    def put(self, meta: ObjectMeta, data: bytes | bytearray | memoryview) -> bool:
        """Keep the bytes of an object, and make room for them.

        Returns:
            Whether they are kept.

        Raises:
            ChecksumError: They are not what the metadata says of the object.
        """
        path = self._path(meta)
        content = data if isinstance(data, bytes) else bytes(data)
        if path is None or FOOTER_BYTES + len(content) > self.max_bytes:
            return False
        if time.monotonic() < self._paused_until or path in self._obstructed:
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
        try:
            try:
                return self._keep(path, content, checksum)
            except FileNotFoundError:  # somebody has removed the directory
                self._prepare()
                return self._keep(path, content, checksum)
        except OSError as exc:
            self._refused(path, exc)
            return False

    def _keep(self, path: str, content: bytes, checksum: int) -> bool:
        size = len(content) + FOOTER_BYTES
        if not self._has_room(size):
            return False
        try:
            write_entry(path, content, checksum)
        except BaseException:
            with self._own_ledger():
                self._room += size
            raise
        return True

    def _refused(self, path: str, error: OSError) -> None:
        """Do without an entry whose place is taken, and without all where the disk refuses."""
        is_taken = isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError)
        if is_taken and len(self._obstructed) < _MAX_OBSTRUCTED:
            self._obstructed.add(path)
            self._tell(f"cannot store {path}, whose place something else takes: remove it", error)
            return
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        self._tell(f"stores nothing for the next {_PAUSE_SECONDS:.0f} seconds", error)

    def _tell_unreadable(self, path: str, error: OSError) -> None:
        """Tell of one of those that cannot be read; it may be all of them."""
        now = time.monotonic()
        if now >= self._told_until:
            self._told_until = now + _PAUSE_SECONDS
            self._tell(f"cannot read {path}", error)

    def _tell(self, what: str, error: OSError) -> None:
        _log.warning("the cache in %s %s: %s", self.directory, what, error)

    @contextmanager
    def _own_ledger(self) -> Iterator[None]:
        """Hold the ledger; a forked child has none of its parent's room."""
        with self._lock.mine:
            if self._pid != os.getpid():
                self._start()
            yield

    def _has_room(self, size: int) -> bool:
        """Take room for `size` bytes, removing others where there is too little; tell whether."""
        with self._own_ledger():
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
        oldest_ns, told_before = time.time_ns() - _LEFT_OVER_NS, self._ledger.total()
        total, entries = 0, []
        for entry in entries_below(self._objects):
            mtime_ns, num_bytes, path = entry
            if not is_unfinished(entry):
                entries.append(entry)
            elif mtime_ns < oldest_ns:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                continue
            total += num_bytes
        if total + size > self.max_bytes:
            room = max(0, min(int(self.max_bytes * _KEPT_SHARE), self.max_bytes - size))
            for path, num_bytes in oldest(entries, total - room):
                with suppress(FileNotFoundError):  # its reader found it damaged
                    os.unlink(path)
                total -= num_bytes
        # What others have taken meanwhile may be in entries that were not there to be measured.
        told_meanwhile = max(0, self._ledger.total() - told_before)
        self._ledger.restart(total + size + told_meanwhile)

    def _remove(self, path: str) -> None:
        with suppress(OSError):  # gone, or it cannot be removed: it is no hit either way
            num_bytes = os.stat(path).st_size
            os.unlink(path)
            with self._own_ledger():
                self._ledger.add(-num_bytes)


def _restore(directory: str, max_bytes: int) -> Cache:
    return Cache(directory, max_bytes=max_bytes)
