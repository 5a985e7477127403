"""Cache: whole objects on a local disk, shared by processes and runs, with a size limit.

    <directory>/objects/ab/cdef...   an entry: data, footer; its mtime is the time of its last use,
                                     with a precision of ten seconds
               /objects/ab/~...      an entry that is being written; renamed when complete
               /ledger               changes of the total size of `objects`, 8 bytes for each
               /lock                 locked during an eviction, without ever waiting for the lock

Because of the rename, an entry is either complete or missing, also after a SIGKILL. A checksum
detects damage by a power failure. No process waits for another: if the cache is full and another
process is evicting, an object is not stored.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
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
    from aioflux._values.meta import ObjectMeta

_log = logging.getLogger("aioflux")

_KEPT_FRACTION = 0.9
"""Largest fraction of `max_bytes` that is in use after an eviction. Evictions must be rare, because
each examines all entries, at 3 us for an entry."""
_ORPHAN_AGE_NS = 900 * 10**9
"""Age from which an unfinished entry is assumed to belong to a dead process."""
_RESERVATIONS = 1024
"""A process reserves at least `max_bytes / 1024` at a time in the ledger. A reservation costs four
system calls, and each of these takes 0.3 ms if another thread waits for the GIL."""
_PAUSE_SECONDS = 30.0
"""Time after a disk error in which no object is stored; also shortest time between two warnings of
failed reads."""
_MAX_OCCUPIED = 64
"""Number of entry paths that foreign files may occupy; one more is handled as a disk error."""


class Cache:
    """Objects on a local disk, by uri and generation.

    Any number of processes and runs may share the directory. Each process applies its own
    `max_bytes`. The least recently used entries are evicted first. An object is not stored if the
    disk is full, or if the cache is full and another process is evicting. Disk errors are logged as
    warnings by the logger "aioflux". Objects without generation, etag and crc32c are not cached,
    because a change of such an object could not be detected.

    Use a local directory: on a network file system each hit would be a transfer over the network.

    A pickle contains only the settings. A forked child opens its own files.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int) -> None:
        """Open a cache, and create its directory if it is missing.

        Args:
            directory: Directory of the cache, on a local disk.
            max_bytes: Largest total size of the entries, in bytes, without the overhead of the file
                system, such as unused ends of blocks.

        Raises:
            OSError: The directory cannot be created.
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
        # Only for this user: the objects may be confidential.
        os.makedirs(self._join("objects", "00"), mode=0o700, exist_ok=True)

    def _start(self) -> None:
        """Initialize the state of this process, when the cache is opened and after a fork."""
        self._ledger = Ledger(self._join("ledger"), self._join("objects", "00"))
        self._reserved_bytes, self._pid = 0, os.getpid()
        self._paused_until = self._warned_until = 0.0
        self._occupied: set[str] = set()

    def _join(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    def _path(self, meta: ObjectMeta) -> str | None:
        identity = meta.generation or meta.etag
        if not identity and meta.crc32c is not None:  # of a copied dataset
            identity = f"{meta.crc32c:08x}-{meta.size}"
        if not identity:
            return None
        text = f"{meta.uri}\0{identity}".encode("utf-8", "surrogatepass")
        name = hashlib.sha256(text).hexdigest()
        return f"{self._objects_path}/{name[:2]}/{name[2:]}"

    def has(self, meta: ObjectMeta) -> bool:
        """Return whether an object has an entry, without reading the entry. Takes about 5 us."""
        path = self._path(meta)
        return path is not None and os.access(path, os.F_OK)

    def get(self, meta: ObjectMeta) -> bytes | None:
        """Return the verified bytes of an object, or None if they are not cached or not readable.

        A damaged entry is deleted. For a damaged or unreadable entry, a warning is logged.
        """
        path = self._path(meta)
        if path is None:
            return None
        try:
            return read_entry(path, meta)
        except FileNotFoundError:
            return None
        except DamagedError as exc:
            _log.warning("the cached copy of %s is damaged: %s (%s)", meta.uri, exc, path)
            self._remove(path)
            return None
        except OSError as exc:
            self._warn_unreadable(path, exc)
            return None

    def put(self, meta: ObjectMeta, data: bytes | bytearray | memoryview) -> bool:
        """Store the bytes of an object; may evict other objects.

        Returns:
            Whether the bytes were stored.

        Raises:
            ChecksumError: `data` does not match the metadata of the object.
        """
        path = self._path(meta)
        content = data if isinstance(data, bytes) else bytes(data)
        if path is None or FOOTER_BYTES + len(content) > self.max_bytes:
            return False
        if time.monotonic() < self._paused_until or path in self._occupied:
            return False
        checksum = int(google_crc32c.value(content))
        expected = checksum if meta.crc32c is None else meta.crc32c
        if len(content) != meta.size or checksum != expected:
            raise ChecksumError(
                f"{meta.uri} is not cached: expected {meta.size} bytes with crc32c "
                f"{expected:#010x}, not {len(content)} bytes with crc32c {checksum:#010x}; read "
                "the object again",
                uri=meta.uri,
            )
        try:
            try:
                return self._store(path, content, checksum)
            except FileNotFoundError:  # the directory was deleted after the cache was opened
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
            with self._locked_ledger():
                self._reserved_bytes += size
            raise
        return True

    def _on_disk_error(self, path: str, error: OSError) -> None:
        """Remember a path that foreign files occupy; after any other error, pause all writes."""
        is_occupied = isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError)
        if is_occupied and len(self._occupied) < _MAX_OCCUPIED:
            self._occupied.add(path)
            self._warn(f"cannot store {path}: remove the file or directory at this path", error)
            return
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        self._warn(f"stores nothing for the next {_PAUSE_SECONDS:.0f} seconds", error)

    def _warn_unreadable(self, path: str, error: OSError) -> None:
        """Log a warning, at most one in 30 seconds: all entries may be unreadable."""
        now = time.monotonic()
        if now >= self._warned_until:
            self._warned_until = now + _PAUSE_SECONDS
            self._warn(f"cannot read {path}", error)

    def _warn(self, problem: str, error: OSError) -> None:
        _log.warning("the cache in %s %s: %s", self.directory, problem, error)

    @contextmanager
    def _locked_ledger(self) -> Iterator[None]:
        """Acquire the lock of the ledger; a forked child first discards its parent's reservation.

        The lock works within this process only.
        """
        with self._lock.current:
            if self._pid != os.getpid():
                self._start()
            yield

    def _reserve(self, size: int) -> bool:
        """Reserve `size` bytes for an entry, evict others if needed; return whether it worked."""
        with self._locked_ledger():
            if size > self._reserved_bytes:
                step = max(size, self.max_bytes // _RESERVATIONS)
                if not self._reserve_in_ledger(step):
                    return False
                self._reserved_bytes += step
            self._reserved_bytes -= size
            return True

    def _reserve_in_ledger(self, size: int) -> bool:
        # Add before checking the total: if two processes need the last bytes, at most one succeeds.
        total = self._ledger.add_and_sum(size)
        if self._ledger.is_measured and total <= self.max_bytes:
            return True
        with self._eviction_lock() as is_held:
            if is_held:
                self._evict(size)
                return True
        # Another process is evicting: accept the entry only if it fits without the eviction.
        if total <= self.max_bytes:
            return True
        self._ledger.add(-size)
        return False

    @contextmanager
    def _eviction_lock(self) -> Iterator[bool]:
        """Acquire the eviction lock if it is free, and yield whether it was.

        The kernel releases the lock when its process dies. Locks of `lockf` are not inherited by
        forked children; locks of `flock` are.
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
        """Measure all entries; if `size` more bytes do not fit, delete the least recently used.

        Then at most `_KEPT_FRACTION` of `max_bytes` remains.
        """
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
                with suppress(FileNotFoundError):  # a reader has deleted it as damaged
                    os.unlink(path)
                total -= num_bytes
        # Bytes that other processes reserved meanwhile may belong to entries not measured above.
        added_meanwhile = max(0, self._ledger.total() - before)
        self._ledger.restart(total + size + added_meanwhile)

    def _remove(self, path: str) -> None:
        with suppress(OSError):  # if it cannot be deleted, `get` returns None for it again
            num_bytes = os.stat(path).st_size
            os.unlink(path)
            with self._locked_ledger():
                self._ledger.add(-num_bytes)


def _restore(directory: str, max_bytes: int) -> Cache:
    return Cache(directory, max_bytes=max_bytes)
