"""What a copy does, decided without I/O: who goes where, in which batches, and what cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from aioflux.cli._text import one_line

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "LARGE_BYTES",
    "Batcher",
    "Clashes",
    "Job",
    "Problem",
    "base_name",
    "is_temporary",
    "local_problem",
]

MIB = 1024 * 1024
LARGE_BYTES = 16 * MIB
"""Above this, an object is streamed by itself; up to it, it is one request among those of a
batch."""
_BATCH_BYTES = 32 * MIB
_BATCH_OBJECTS = 128
"""With four batches under way: 512 objects and 128 MiB, enough to keep 64 requests busy while the
disk is written to."""

TEMPORARY = ".aioflux-"
"""Local names that begin so are kept for writes under way."""
_WRITE_UNDER_WAY = re.compile(re.escape(TEMPORARY) + r"(lock-)?[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Job:
    """One object to copy."""

    source: str
    """What is read, as messages name it."""
    target: str
    """What is written, as messages name it."""
    origin: ObjectMeta | str
    """What is read: metadata, which pins the generation, or a local path."""
    goal: str
    """What is written: a key, or a local path."""
    size: int
    """Bytes; -1 where only the end tells."""

    @property
    def is_large(self) -> bool:
        """Whether it is streamed by itself."""
        return not 0 <= self.size <= LARGE_BYTES


@dataclass(frozen=True, slots=True)
class Problem:
    """One object that cannot be copied, and why."""

    message: str


Work: TypeAlias = "Job | Problem"


def base_name(text: str) -> str:
    """Return the last segment of a key or path."""
    return text.rstrip("/").rpartition("/")[2]


def is_temporary(name: str) -> bool:
    """Tell whether a name in a local directory is that of a write under way."""
    return _WRITE_UNDER_WAY.fullmatch(name) is not None


def local_problem(key: str) -> str:
    """Return why a key can be no path below a directory, or nothing where it can.

    The segments of a key become names of directories and of a file; whatever they are, the path
    must stay below the directory, and two keys must not be one path.
    """
    if not key:
        return "its name is that of the prefix; copy it by itself to another name"
    segments = key.removesuffix("/").split("/")
    if "\0" in key:
        return "it has a NUL"
    if ".." in segments:
        return "'..' would leave the directory"
    if segments[0] == "":
        return "an absolute path would leave the directory"
    if "" in segments or "." in segments:
        return "an empty or '.' segment is no name of a directory"
    if any(segment.startswith(TEMPORARY) for segment in segments):
        return f"names that begin with {TEMPORARY!r} are kept for writes under way"
    return ""


@dataclass(slots=True)
class Clashes:
    """Finds keys that need a directory where an earlier key is a file; takes keys in order.

    In key order, all keys that begin with `a` come one after the other, so that of the keys before
    only those that begin this one have to be remembered.
    """

    _files: list[str] = field(default_factory=list)

    def add(self, key: str) -> str:
        """Take the next key; return the earlier one that stands in its way, or nothing."""
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
    """Gathers jobs into batches of bounded count and bytes; a large one is a batch by itself."""

    is_ordered: bool = False
    """Whether the batches, one after the other, keep the order of the jobs."""
    _jobs: list[Job] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, job: Job) -> list[list[Job]]:
        """Take a job, and return the batches that are full now."""
        if job.is_large:
            return [self.rest(), [job]] if self.is_ordered and self._jobs else [[job]]
        full = []
        if self._jobs and self._num_bytes + job.size > _BATCH_BYTES:
            full.append(self.rest())
        self._jobs.append(job)
        self._num_bytes += job.size
        if len(self._jobs) >= _BATCH_OBJECTS:
            full.append(self.rest())
        return full

    def rest(self) -> list[Job]:
        """Return what is gathered, and begin anew."""
        jobs, self._jobs, self._num_bytes = self._jobs, [], 0
        return jobs


def clash_message(uri: str, other: str) -> str:
    """Say that two objects want one local path, one as a file and one as a directory."""
    return (
        f"cannot copy {one_line(uri)}: {one_line(other)} is a file where it needs a directory; "
        "copy one of the two elsewhere"
    )
