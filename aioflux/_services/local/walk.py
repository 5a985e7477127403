"""The keys of a directory, in key order, and the paths of keys.

Keys are paths below the directory. An object is a regular file. Symbolic links are followed to
targets below the directory; links that lead out of it, to nothing or back to a directory above them
are ignored, as are pipes, sockets, devices and writes in progress.

A name that is not UTF-8 is a key with surrogate escapes, as in Python.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "TEMPORARY",
    "Walk",
    "check_key",
    "is_temporary",
    "locate",
    "modified",
    "status_of",
    "temporaries",
]

TEMPORARY = ".aioflux-"
"""Prefix of the names of writes in progress, which are neither listed nor keys."""
_DELETED = re.compile(r"\.nfs[0-9a-f]{16,}")
"""Names that NFS clients give to files that are deleted while they are open."""
_TEMPORARY = re.compile(re.escape(TEMPORARY) + r"(lock-)?[0-9a-f]{32}")
_FIRST, _LAST = (datetime(year, 1, 2, tzinfo=UTC) for year in (1, 9999))
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors for a path that does not exist."""


def is_temporary(name: str) -> bool:
    """Return whether the name is that of a temporary file of this package."""
    return _TEMPORARY.fullmatch(name) is not None


def check_key(key: str) -> None:
    """Raise ValueError for a key that is not a path strictly below a directory.

    Rejected are keys that are empty or absolute, have an empty, `.` or `..` segment or a NUL, or
    name a write in progress or a deleted file on NFS.
    """
    if not _is_key(key):
        raise ValueError(
            f"{key!r} cannot be a file below a directory: segments must not be empty, '.' or "
            f"'..', nor begin with {TEMPORARY!r}, nor be '.nfs' and 16 digits or more"
        )


def _is_key(key: str) -> bool:
    segments = key.split("/")
    bad = any(segment in {"", ".", ".."} or _is_hidden(segment) for segment in segments)
    return not bad and "\0" not in key


def _is_hidden(name: str) -> bool:
    return name.startswith(TEMPORARY) or _DELETED.fullmatch(name) is not None


def locate(root: str, key: str) -> str:
    """Return the path of a key, which need not exist.

    Raises:
        PermissionError: A symbolic link on the way leads out of the directory.
        ValueError: `check_key` rejects it.
    """
    check_key(key)
    path = root.rstrip("/")
    linked = False
    for segment in key.split("/")[:-1]:
        path += f"/{segment}"
        linked = linked or os.path.islink(path)
    if linked and not _is_below(os.path.realpath(path), os.path.realpath(root)):
        raise PermissionError(
            errno.EPERM, "a symbolic link on the way leads out of the directory", path
        )
    return f"{path}/{key.rpartition('/')[2]}"


def status_of(root: str, key: str) -> tuple[str, os.stat_result]:
    """Return path and status of the regular file of a key.

    Raises:
        FileNotFoundError: There is none, or it is not below the directory.
        OSError: The file system failed.
        ValueError: `check_key` rejects the key.
    """
    path = ""
    try:
        path = locate(root, key)
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            _, status = _follow(path, os.path.realpath(root))
    except OSError as exc:
        if exc.errno in {*_NOTHING, errno.EPERM}:
            raise FileNotFoundError(errno.ENOENT, exc.strerror, path) from exc
        raise
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", path)
    return path, status


def _is_below(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip("/") + "/")


def _follow(path: str, root: str) -> tuple[str, os.stat_result]:
    """Return real path and status of a symbolic link, which must be below the real path `root`."""
    real = os.path.realpath(path)
    if not _is_below(real, root):
        raise FileNotFoundError(errno.ENOENT, "the symbolic link leads out of the directory", path)
    # The link itself, since a loop of links has no real path.
    return real, os.stat(path)


class _Level:
    """One directory on the path of the current key, and its remaining rows, in reverse order."""

    __slots__ = ("base", "real", "rows")

    def __init__(self, base: str, real: str) -> None:
        self.base = base
        self.real = real
        self.rows: list[tuple[str, os.DirEntry[str], str]] = []


class Walk:
    """The objects below a directory whose keys begin with `prefix`, from `low` on, in key order.

    An iterator of (key, entry), which may be continued later. Each directory is read once, and only
    if it can hold such keys.
    """

    def __init__(self, root: str, prefix: str, low: str) -> None:
        self._root = os.path.realpath(root)
        self._prefix = prefix
        self._low = low
        self._skipped = ""
        self._closed = ""
        self._levels: list[_Level] = []
        self._returned: list[tuple[str, os.DirEntry[str]]] = []
        base = prefix[: prefix.rfind("/") + 1]
        if not base:
            self._enter(root, self._root, "")
        elif _is_key(base[:-1]):
            self._begin(base)

    def _begin(self, base: str) -> None:
        """Enter the directory of a prefix."""
        real = os.path.realpath(f"{self._root.rstrip('/')}/{base[:-1]}")
        try:
            if _is_below(real, self._root):
                self._enter(real, real, base)
        except OSError as exc:
            if exc.errno not in _NOTHING:
                raise

    def __iter__(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        return self

    def __next__(self) -> tuple[str, os.DirEntry[str]]:
        if self._returned:
            return self._returned.pop()
        while self._levels:
            level = self._levels[-1]
            if not level.rows:
                self._levels.pop()
                continue
            name, entry, real = level.rows.pop()
            key = level.base + name
            if self._skipped and key.startswith(self._skipped):
                continue
            if not name.endswith("/"):
                return key, entry
            try:
                self._enter(entry.path, real or f"{level.real}/{name[:-1]}", key)
            except OSError:
                level.rows.append((name, entry, real))  # the next call retries it
                self._closed = key
                raise
        raise StopIteration

    def read_page(
        self, limit: int, *, end: str, delimiter: str
    ) -> tuple[list[tuple[str, os.stat_result]], list[str], str]:
        """Return up to `limit` keys and common prefixes, before the key `end`.

        Returns:
            Keys with the status of their files, common prefixes up to the delimiter, and the first
            key of the next page, empty after the last one. A directory that cannot be read ends a
            page early.

        Raises:
            OSError: A directory cannot be read, and the page would be empty.
        """
        found: list[tuple[str, os.stat_result]] = []
        prefixes: list[str] = []
        self._closed = ""
        try:
            follows = self._collect(found, prefixes, limit, end=end, delimiter=delimiter)
        except OSError:
            if not self._closed or not (found or prefixes):
                raise
            follows = self._closed
        return found, prefixes, follows

    def _collect(
        self,
        found: list[tuple[str, os.stat_result]],
        prefixes: list[str],
        limit: int,
        *,
        end: str,
        delimiter: str,
    ) -> str:
        """Fill both lists, and return the next key."""
        for key, entry in self:
            if end and key >= end:
                break
            if len(found) + len(prefixes) >= limit:
                self._returned.append((key, entry))
                return key
            cut = key.find(delimiter, len(self._prefix)) if delimiter else -1
            if cut >= 0:
                prefixes.append(key[: cut + len(delimiter)])
                self._skip(prefixes[-1])
                continue
            with suppress(FileNotFoundError):  # deleted while it was listed
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    found.append((key, status))
        return ""

    def _skip(self, prefix: str) -> None:
        """Skip the remaining keys that begin with `prefix`."""
        self._skipped = prefix
        while self._levels and self._levels[-1].base.startswith(prefix):
            self._levels.pop()

    def _enter(self, path: str, real: str, base: str) -> None:
        level = _Level(base, real)
        try:
            with os.scandir(path) as found:
                level.rows = [row for entry in found if (row := self._row(level, entry))]
        except FileNotFoundError:
            return  # removed meanwhile; and a missing root is an empty store
        except NotADirectoryError:
            if base:
                return  # the prefix continues the key of an object
            raise
        level.rows.sort(key=_first, reverse=True)
        self._levels.append(level)

    def _row(
        self, level: _Level, entry: os.DirEntry[str]
    ) -> tuple[str, os.DirEntry[str], str] | None:
        """Return (name, entry, real path of a link), or None; directories end with `/`."""
        name = entry.name
        key = level.base + name
        below = f"{key}/"
        related = key.startswith(self._prefix) or self._prefix.startswith(below)
        reaches = below >= self._low or self._low.startswith(below)
        if not related or not reaches or _is_hidden(name):
            return None
        if entry.is_dir(follow_symlinks=False):
            return f"{name}/", entry, ""
        real = ""
        if entry.is_symlink():
            linked = self._linked(level, entry)
            if linked is None:
                return None
            real, is_directory = linked
            if is_directory:
                return f"{name}/", entry, real
        elif not entry.is_file(follow_symlinks=False):
            return None
        if not key.startswith(self._prefix) or key < self._low:
            return None
        return name, entry, real

    def _linked(self, level: _Level, entry: os.DirEntry[str]) -> tuple[str, bool] | None:
        """Return the target of a link and whether it is a directory; None if it is ignored."""
        try:
            real, status = _follow(entry.path, self._root)
        except OSError as exc:
            if exc.errno in _NOTHING:
                return None
            raise
        if stat.S_ISREG(status.st_mode):
            return real, False
        within = {self._root, level.real, *(each.real for each in self._levels)}
        if not stat.S_ISDIR(status.st_mode) or real in within:
            return None
        return real, True


def _first(row: tuple[str, os.DirEntry[str], str]) -> str:
    return row[0]


def modified(status: os.stat_result) -> datetime:
    """Return the modification time of a file, limited to the years of `datetime`."""
    seconds = min(max(status.st_mtime, _FIRST.timestamp()), _LAST.timestamp())
    return datetime.fromtimestamp(seconds, UTC)


def temporaries(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the temporary files of writers, those of killed ones included.

    As (path below the directory, status), in no order. Links are not followed, and files of other
    programs with similar names are left out.
    """
    directories = [""]
    while directories:
        base = directories.pop()
        try:
            with os.scandir(f"{root}/{base}") as found:
                entries = list(found)
        except FileNotFoundError:
            continue  # removed meanwhile; and a missing root is empty
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(f"{base}{entry.name}/")
            elif is_temporary(entry.name):
                with suppress(FileNotFoundError):  # done meanwhile
                    yield base + entry.name, entry.stat(follow_symlinks=False)
