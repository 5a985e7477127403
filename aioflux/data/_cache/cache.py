"""Cache: whole objects on a local disk, shared by processes and runs, bounded, evicted by age.

    <directory>/objects/ab/cdef...   one entry: data, footer; its mtime is the time of its last use,
                                 to within ten seconds
               /objects/ab/~...      an entry being written; renamed into place when whole
               /ledger               8 bytes for every change of the bytes in `objects`
               /lock                 held during an eviction; never waited for

An entry is whole or missing, because it is renamed into place, and its checksum is verified: a
SIGKILL leaves no wrong one, and damage by a power failure is detected. No process waits for
another: one that cannot get the lock stores nothing.
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

from aioflux._bridge import ForkSafeLock
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

_KEPT_FRACTION = 0.9
"""Part of the bound that an eviction keeps: it examines every entry, at 3 us each, which would be
too slow for every new object."""
_ORPHAN_AGE_NS = 900 * 10**9
"""Age at which an unfinished entry is assumed to belong to a dead process."""
_RESERVATIONS = 1024
"""Parts of the bound, of which a process reserves one at a time: the ledger costs four system
calls, and each of them 0.3 ms if another thread waits for the interpreter lock."""
_PAUSE_SECONDS = 30.0
"""Time for which nothing is stored after an error of the disk."""
_MAX_OBSTRUCTED = 64
"""Paths occupied by something else, from which on these count as errors of the disk."""


class Cache:
    """Objects on a local disk, by uri and generation.

    Any number of processes and runs may share the directory, also with different `max_bytes`; each
    keeps to its own. The least recently used entries are evicted first. If the disk is full or
    another process is evicting at that time, an object is not stored; errors of the disk are a
    warning of the logger "aioflux". Objects with neither a generation nor an etag are not kept,
    since changes would go unnoticed.

    Use a local directory: on a network file system a hit would be a transfer again.

    Pickles and forks as its settings; files are opened when they are needed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int) -> None:
        """Open a cache, and make its directory if there is none.

        Args:
            directory: Directory of the cache, on a local disk.
            max_bytes: Size of all entries, at most, in bytes; the overhead of the file system, such
                as whole blocks, is not counted.

        Raises:
            OSError: The directory cannot be made.
            ValueError: `max_bytes` is not above 0.
        """
        if max_bytes <= 0:
            raise ValueError(f"max_bytes of a cache must be above 0, not {max_bytes!r}")
        self.directory = os.path.abspath(os.fspath(directory))
        self.max_bytes = max_bytes
        self._objects_path = self._join("objects")
        self._lock = ForkSafeLock()  # guards the ledger and the bytes reserved in it
        self._make_directories()
        self._start()

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.directory, self.max_bytes)

    def _make_directories(self) -> None:
        # The objects may be confidential.
        os.makedirs(self._join("objects", "00"), mode=0o700, exist_ok=True)

    def _start(self) -> None:
        """Set the state of a process that has just opened the cache, or was forked."""
        self._ledger = Ledger(self._join("ledger"), self._join("objects", "00"))
        self._reserved_bytes, self._pid = 0, os.getpid()
        self._paused_until = self._warned_until = 0.0
        self._obstructed: set[str] = set()

    def _join(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    def _path(self, meta: ObjectMeta) -> str | None:
        identity = meta.generation or meta.etag
        if not identity:
            return None
        text = f"{meta.uri}\0{identity}".encode("utf-8", "surrogatepass")
        name = hashlib.sha256(text).hexdigest()
        return f"{self._objects_path}/{name[:2]}/{name[2:]}"

    def has(self, meta: ObjectMeta) -> bool:
        """Return whether there is an entry of an object, which only `get` verifies.

        For prefetching: takes about 5 us.
        """
        path = self._path(meta)
        return path is not None and os.access(path, os.F_OK)

    def get(self, meta: ObjectMeta) -> bytes | None:
        """Return the bytes of an object, verified, or None if they are missing.

        A damaged entry is removed, with a warning.
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
            self._warn_unreadable(path, exc)
            return None

    def put(self, meta: ObjectMeta, data: bytes | bytearray | memoryview) -> bool:
        """Store the bytes of an object; may evict others.

        Returns:
            Whether they are stored.

        Raises:
            ChecksumError: They do not match the metadata of the object.
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
                return self._store(path, content, checksum)
            except FileNotFoundError:  # the directory was removed
                self._make_directories()
                return self._store(path, content, checksum)
        except OSError as exc:
            self._on_disk_error(path, exc)
            return False

    def _store(self, path: str, content: bytes, checksum: int) -> bool:
        size = len(content) + FOOTER_BYTES
        if not self._reserve(size):
            return False
        try:
            write_entry(path, content, checksum)
        except BaseException:
            with self._own_ledger():
                self._reserved_bytes += size
            raise
        return True

    def _on_disk_error(self, path: str, error: OSError) -> None:
        """Give up an entry whose path is occupied; after other errors, store nothing for a time."""
        is_occupied = isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError)
        if is_occupied and len(self._obstructed) < _MAX_OBSTRUCTED:
            self._obstructed.add(path)
            self._warn(f"cannot store {path}, which something else occupies: remove it", error)
            return
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        self._warn(f"stores nothing for the next {_PAUSE_SECONDS:.0f} seconds", error)

    def _warn_unreadable(self, path: str, error: OSError) -> None:
        """Warn of one unreadable entry at a time; all may be unreadable."""
        now = time.monotonic()
        if now >= self._warned_until:
            self._warned_until = now + _PAUSE_SECONDS
            self._warn(f"cannot read {path}", error)

    def _warn(self, problem: str, error: OSError) -> None:
        _log.warning("the cache in %s %s: %s", self.directory, problem, error)

    @contextmanager
    def _own_ledger(self) -> Iterator[None]:
        """Hold the lock of the ledger; a forked child has no reservation of its parent."""
        with self._lock.current:
            if self._pid != os.getpid():
                self._start()
            yield

    def _reserve(self, size: int) -> bool:
        """Reserve `size` bytes, evicting others if needed; return whether that succeeded."""
        with self._own_ledger():
            if size > self._reserved_bytes:
                step = max(size, self.max_bytes // _RESERVATIONS)
                if not self._reserve_in_ledger(step):
                    return False
                self._reserved_bytes += step
            self._reserved_bytes -= size
            return True

    def _reserve_in_ledger(self, size: int) -> bool:
        # Added before the total is checked: of two processes only one gets the last bytes.
        total = self._ledger.add_and_sum(size)
        if self._ledger.is_measured and total <= self.max_bytes:
            return True
        with self._eviction_lock() as is_held:
            if is_held:
                self._evict(size)
                return True
        # Another process evicts: only what certainly fits may be added meanwhile.
        if total <= self.max_bytes:
            return True
        self._ledger.add(-size)
        return False

    @contextmanager
    def _eviction_lock(self) -> Iterator[bool]:
        """Acquire the lock if it is free; the kernel releases that of a dead process.

        By `lockf`, whose locks children do not inherit as those of `flock`.
        """
        file = os.open(self._join("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        """Measure all entries, and remove the least recently used ones until `size` fits."""
        orphaned_ns, before = time.time_ns() - _ORPHAN_AGE_NS, self._ledger.total()
        total, entries = 0, []
        for entry in entries_below(self._objects_path):
            mtime_ns, num_bytes, path = entry
            if not is_unfinished(entry):
                entries.append(entry)
            elif mtime_ns < orphaned_ns:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                continue
            total += num_bytes
        if total + size > self.max_bytes:
            limit = max(0, min(int(self.max_bytes * _KEPT_FRACTION), self.max_bytes - size))
            for path, num_bytes in oldest(entries, total - limit):
                with suppress(FileNotFoundError):  # a reader found it damaged
                    os.unlink(path)
                total -= num_bytes
        # Reservations of others meanwhile may be of entries that were not measured.
        added_meanwhile = max(0, self._ledger.total() - before)
        self._ledger.restart(total + size + added_meanwhile)

    def _remove(self, path: str) -> None:
        with suppress(OSError):  # missing or irremovable: no hit either way
            num_bytes = os.stat(path).st_size
            os.unlink(path)
            with self._own_ledger():
                self._ledger.add(-num_bytes)


def _restore(directory: str, max_bytes: int) -> Cache:
    return Cache(directory, max_bytes=max_bytes)
