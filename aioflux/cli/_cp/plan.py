"""Plan of a copy, without I/O: jobs, batches, and keys that cannot be local paths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from aioflux._local_files import TEMPORARY

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

MIB = 1024 * 1024
SECOND = 1_000_000_000
"""Nanoseconds of a second."""
LARGE_BYTES = 16 * MIB
"""An object up to this size is read by one request, as part of a batch. Larger objects are
streamed."""
_BATCH_BYTES = 32 * MIB
_BATCH_OBJECTS = 128
"""Limits of one batch. Four batches in flight are 512 objects and 128 MiB, enough to keep 64
requests in flight while files are written."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One object to copy."""

    source: str
    """Name of the source in messages."""
    target: str
    """Name of the target in messages."""
    read_from: ObjectMeta | str
    """Metadata of the object, which pins its generation, or a local path."""
    write_to: str
    """Key or local path."""
    size: int
    """Size in bytes; -1 for a standard stream, whose size is unknown."""
    mtime_ns: int = 0
    """Time of the last change of the source, in ns since 1970; 0 if unknown."""

    @property
    def is_large(self) -> bool:
        """Return whether the object is streamed."""
        return not 0 <= self.size <= LARGE_BYTES


@dataclass(frozen=True, slots=True)
class Problem:
    """An object that cannot be copied."""

    message: str
    hides_names: bool = False
    """Whether a directory could not be listed."""


JobOrProblem: TypeAlias = "CopyJob | Problem"


@dataclass(frozen=True, slots=True)
class Entry:
    """An object or a file on one side of a copy."""

    item: ObjectMeta | str
    """Metadata of the object, or the local path."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of the last change of the bytes, in ns since 1970; of an object, of its last write."""
    ctime_ns: int = 0
    """Time of the last change of the file, its attributes included; 0 for an object."""

    @property
    def crc32c(self) -> int | None:
        """The CRC32C, if it is known without reading the bytes."""
        return None if isinstance(self.item, str) else self.item.crc32c


def object_entry(meta: ObjectMeta) -> Entry:
    """Return the entry of an object."""
    return Entry(
        meta,
        meta.size,
        round(meta.updated.timestamp() * 1000) * (SECOND // 1000) if meta.updated else 0,
    )


def differs(source: Entry, target: Entry) -> bool:
    """Return whether a copy is needed, as far as sizes, times and known checksums show.

    A local copy has the time of its source. An object is a copy of a file that was not changed
    after the object was written; `ctime_ns` shows files that were replaced by older ones.
    """
    if source.size != target.size:
        return True
    if source.crc32c is not None and target.crc32c is not None:
        return source.crc32c != target.crc32c
    if not source.mtime_ns or not target.mtime_ns:
        return True
    if isinstance(target.item, str):
        # Some file systems store whole seconds.
        return target.mtime_ns not in {source.mtime_ns, source.mtime_ns // SECOND * SECOND}
    if isinstance(source.item, str):
        # A file with exactly the time of the object was downloaded.
        changed_ns = max(source.mtime_ns, source.ctime_ns)
        return source.mtime_ns != target.mtime_ns and changed_ns > target.mtime_ns
    # Whole seconds are rounded down.
    is_rounded = not source.mtime_ns % SECOND
    return source.mtime_ns + is_rounded * SECOND > target.mtime_ns


def base_name(text: str) -> str:
    """Return the last segment of a key or path."""
    return text.rstrip("/").rpartition("/")[2]


def local_problem(key: str) -> str:
    """Return why a key cannot be a path below a directory; empty if it can.

    The path must stay below the directory, and two keys must not become one path.
    """
    if not key:
        return "it has the name of the prefix itself; copy it to another name, without -r"
    segments = key.removesuffix("/").split("/")
    if "\0" in key:
        return "its name has a NUL character"
    if ".." in segments:
        return "'..' would leave the directory"
    if segments[0] == "":
        return "an absolute path would leave the directory"
    if "" in segments or "." in segments:
        return "an empty or '.' segment cannot be a directory name"
    if any(segment.startswith(TEMPORARY) for segment in segments):
        return f"names that begin with {TEMPORARY!r} are reserved for unfinished writes"
    return ""


@dataclass(slots=True)
class NameClashes:
    """Finder of keys that need a directory with the name of an earlier file: `a`, then `a/b`.

    Keys are added in lexicographic order. All keys that begin with `a` are then adjacent. So it
    is enough to remember the earlier keys that are prefixes of the last key.
    """

    _files: list[str] = field(default_factory=list)

    def add(self, key: str) -> str:
        """Add the next key; return the earlier key that clashes with it, or an empty string."""
        while self._files and not key.startswith(self._files[-1]):
            self._files.pop()
        for file in self._files:
            if key.startswith(f"{file}/"):
                return file
        if not key.endswith("/"):
            self._files.append(key)
        return ""


@dataclass(slots=True)
class Batcher:
    """Batches of jobs, of bounded count and bytes; a large job is a batch of its own."""

    is_ordered: bool = False
    """Whether the sequence of batches keeps the order of the jobs."""
    _jobs: list[CopyJob] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, job: CopyJob) -> list[list[CopyJob]]:
        """Add a job, and return the batches that are full now."""
        if job.is_large:
            return [self.flush(), [job]] if self.is_ordered and self._jobs else [[job]]
        full = []
        if self._jobs and self._num_bytes + job.size > _BATCH_BYTES:
            full.append(self.flush())
        self._jobs.append(job)
        self._num_bytes += job.size
        if len(self._jobs) >= _BATCH_OBJECTS:
            full.append(self.flush())
        return full

    def flush(self) -> list[CopyJob]:
        """Return the jobs that are not in a batch yet."""
        jobs, self._jobs, self._num_bytes = self._jobs, [], 0
        return jobs
