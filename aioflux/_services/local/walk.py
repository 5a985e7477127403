"""Listings of a directory in key order, and the paths of keys.

A key is a path relative to the root directory. An object is a regular file. Symbolic links are
followed if their target is below the root directory. Other links are ignored, and so are links to a
directory that contains them, pipes, sockets, devices, temporary files, and `.nfs` files of NFS
clients.

A file name that is not UTF-8 becomes a key with surrogate escapes, as `os.fsdecode` returns it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from aioflux._local_files import TEMPORARY, is_temporary

_NFS_DELETED = re.compile(r"\.nfs[0-9a-f]{16,}")
"""Names that NFS clients give to a file that is deleted while it is open."""
_FIRST, _LAST = (datetime(year, 1, 2, tzinfo=UTC) for year in (1, 9999))
_MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors for a path that does not exist."""


def check_key(key: str) -> None:
    """Raise ValueError for a key that cannot be the path of an object below the root directory."""
    if not _is_key(key):
        raise ValueError(
            f"{key!r} cannot be a file: no path segment may be empty, '.' or '..', begin with "
            f"{TEMPORARY!r}, or be '.nfs' and 16 or more hex digits; a NUL is not allowed"
        )


def _is_key(key: str) -> bool:
    segments = key.split("/")
    is_invalid = any(segment in {"", ".", ".."} or _is_hidden(segment) for segment in segments)
    return not is_invalid and "\0" not in key


def _is_hidden(name: str) -> bool:
    return name.startswith(TEMPORARY) or _NFS_DELETED.fullmatch(name) is not None


def locate(root: str, key: str) -> str:
    """Return the path of a key; the file may be missing.

    Raises:
        PermissionError: A directory of the path is a symbolic link out of the root directory.
        ValueError: `check_key` rejects the key.
    """
    check_key(key)
    path = root.rstrip("/")
    has_link = False
    for segment in key.split("/")[:-1]:
        path += f"/{segment}"
        has_link = has_link or os.path.islink(path)
    if has_link and not _is_below(os.path.realpath(path), os.path.realpath(root)):
        raise PermissionError(
            errno.EPERM, "a symbolic link in the path leads out of the directory", path
        )
    return f"{path}/{key.rpartition('/')[2]}"


def status_of(root: str, key: str) -> tuple[str, os.stat_result]:
    """Return path and status of the regular file of a key.

    Raises:
        FileNotFoundError: There is no such file, or it is not below the root directory.
        OSError: The file system failed.
        ValueError: `check_key` rejects the key.
    """
    path = ""
    try:
        path = locate(root, key)
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            _, status = _resolve_link(path, os.path.realpath(root))
    except OSError as exc:
        if exc.errno in {*_MISSING_ERRNOS, errno.EPERM}:
            raise FileNotFoundError(errno.ENOENT, exc.strerror, path) from exc
        raise
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", path)
    return path, status


def _is_below(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip("/") + "/")


def _resolve_link(path: str, root: str) -> tuple[str, os.stat_result]:
    """Return real path and status of the target of a symbolic link.

    Raises:
        FileNotFoundError: The target is missing, or not below `root`, which is a real path.
    """
    real = os.path.realpath(path)
    if not _is_below(real, root):
        raise FileNotFoundError(errno.ENOENT, "the symbolic link leads out of the directory", path)
    # Not `os.stat(real)`: for a loop of links, only the path of the link raises ELOOP.
    return real, os.stat(path)


class _Level:
    """One directory that a `Walk` has read: its key, real path, and remaining rows, reversed."""

    __slots__ = ("base", "real", "rows")

    def __init__(self, base: str, real: str) -> None:
        self.base = base
        self.real = real
        self.rows: list[tuple[str, os.DirEntry[str], str]] = []


class Walk:
    """Iterator over the objects below a directory, as (key, entry) in key order.

    Yields keys that begin with `prefix`, from `start` on. Reads a directory only if it can contain
    such keys, and again only after an error.
    """

    def __init__(self, root: str, prefix: str, start: str) -> None:
        self._root = os.path.realpath(root)
        self._prefix = prefix
        self._start = start
        self._skipped_prefix = ""
        self._unread_key = ""
        self._levels: list[_Level] = []
        self._pushed_back: list[tuple[str, os.DirEntry[str]]] = []
        base = prefix[: prefix.rfind("/") + 1]
        if not base:
            self._enter(root, self._root, "")
        elif _is_key(base[:-1]):
            self._enter_prefix(base)

    def _enter_prefix(self, base: str) -> None:
        """Enter the directory of a prefix."""
        real = os.path.realpath(f"{self._root.rstrip('/')}/{base[:-1]}")
        try:
            if _is_below(real, self._root):
                self._enter(real, real, base)
        except OSError as exc:
            if exc.errno not in _MISSING_ERRNOS:
                raise

    def __iter__(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        return self

    def __next__(self) -> tuple[str, os.DirEntry[str]]:
        if self._pushed_back:
            return self._pushed_back.pop()
        while self._levels:
            level = self._levels[-1]
            if not level.rows:
                self._levels.pop()
                continue
            name, entry, real = level.rows.pop()
            key = level.base + name
            if self._skipped_prefix and key.startswith(self._skipped_prefix):
                continue
            if not name.endswith("/"):
                return key, entry
            try:
                self._enter(entry.path, real or f"{level.real}/{name[:-1]}", key)
            except OSError:
                level.rows.append((name, entry, real))  # the next call reads the directory again
                self._unread_key = key
                raise
        raise StopIteration

    def read_page(
        self, limit: int, *, end: str, delimiter: str
    ) -> tuple[list[tuple[str, os.stat_result]], list[str], str]:
        """Return one page: at most `limit` keys and common prefixes, all before the key `end`.

        If a directory cannot be read, the page has the keys before that directory.

        Returns:
            Keys with the status of their files; common prefixes, each with the delimiter at its
            end; and the first key of the next page, empty for the last page.

        Raises:
            OSError: A directory cannot be read and the page would be empty, or the status of a file
                cannot be read.
        """
        files: list[tuple[str, os.stat_result]] = []
        prefixes: list[str] = []
        self._unread_key = ""
        try:
            following_key = self._collect(files, prefixes, limit, end=end, delimiter=delimiter)
        except OSError:
            if not self._unread_key or not (files or prefixes):
                raise
            following_key = self._unread_key
        return files, prefixes, following_key

    def _collect(
        self,
        files: list[tuple[str, os.stat_result]],
        prefixes: list[str],
        limit: int,
        *,
        end: str,
        delimiter: str,
    ) -> str:
        """Fill both lists, and return the first key of the next page."""
        for key, entry in self:
            if end and key >= end:
                break
            if len(files) + len(prefixes) >= limit:
                self._pushed_back.append((key, entry))
                return key
            delimiter_index = key.find(delimiter, len(self._prefix)) if delimiter else -1
            if delimiter_index >= 0:
                prefixes.append(key[: delimiter_index + len(delimiter)])
                self._skip(prefixes[-1])
                continue
            with suppress(FileNotFoundError):  # deleted during the listing
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((key, status))
        return ""

    def _skip(self, prefix: str) -> None:
        """Skip the remaining keys that begin with `prefix`."""
        self._skipped_prefix = prefix
        while self._levels and self._levels[-1].base.startswith(prefix):
            self._levels.pop()

    def _enter(self, path: str, real: str, base: str) -> None:
        level = _Level(base, real)
        try:
            with os.scandir(path) as entries:
                level.rows = [row for entry in entries if (row := self._row(level, entry))]
        except FileNotFoundError:
            return  # removed during the listing, or a missing root: an empty store
        except NotADirectoryError:
            if base:
                return  # an object, so no key can be below it
            raise
        level.rows.sort(key=lambda row: row[0], reverse=True)
        self._levels.append(level)

    def _row(
        self, level: _Level, entry: os.DirEntry[str]
    ) -> tuple[str, os.DirEntry[str], str] | None:
        """Return (name, entry, real path of a link); None if the entry can yield no key.

        The name of a directory gets a `/` at its end, so that rows are sorted in key order.
        """
        name = entry.name
        key = level.base + name
        key_prefix = f"{key}/"
        matches_prefix = key.startswith(self._prefix) or self._prefix.startswith(key_prefix)
        reaches_start = key_prefix >= self._start or self._start.startswith(key_prefix)
        if not matches_prefix or not reaches_start or _is_hidden(name):
            return None
        if entry.is_dir(follow_symlinks=False):
            return f"{name}/", entry, ""
        real = ""
        if entry.is_symlink():
            target = self._follow_link(level, entry)
            if target is None:
                return None
            real, is_directory = target
            if is_directory:
                return f"{name}/", entry, real
        elif not entry.is_file(follow_symlinks=False):
            return None
        if not key.startswith(self._prefix) or key < self._start:
            return None
        return name, entry, real

    def _follow_link(self, level: _Level, entry: os.DirEntry[str]) -> tuple[str, bool] | None:
        """Return the real path of a link, and whether it is a directory; None if ignored."""
        try:
            real, status = _resolve_link(entry.path, self._root)
        except OSError as exc:
            if exc.errno in _MISSING_ERRNOS:
                return None
            raise
        if stat.S_ISREG(status.st_mode):
            return real, False
        containing = {self._root, level.real, *(open_level.real for open_level in self._levels)}
        if not stat.S_ISDIR(status.st_mode) or real in containing:
            return None
        return real, True


def modified(status: os.stat_result) -> datetime:
    """Return the modification time of a file, limited to the range of `datetime`."""
    seconds = min(max(status.st_mtime, _FIRST.timestamp()), _LAST.timestamp())
    return datetime.fromtimestamp(seconds, UTC)


def temporary_files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the temporary files of all writers, including killed writers.

    Yields (path below the root directory, status), unsorted. Links are not followed. Files of other
    programs with the same prefix are not yielded.
    """
    directories = [""]
    while directories:
        base = directories.pop()
        try:
            with os.scandir(f"{root}/{base}") as scan:
                entries = list(scan)
        except FileNotFoundError:
            continue  # removed since it was listed, or a missing root
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(f"{base}{entry.name}/")
            elif is_temporary(entry.name):
                with suppress(FileNotFoundError):  # the writer has finished
                    yield base + entry.name, entry.stat(follow_symlinks=False)
