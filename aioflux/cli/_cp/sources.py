"""Objects or files to copy, each as a job with its name at the target."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux._local_files import is_temporary
from aioflux._values.uri import join_uri
from aioflux.cli._arguments import NameFilter, as_prefix, find
from aioflux.cli._cp.local_files import file_entry
from aioflux.cli._cp.plan import (
    SECOND,
    CopyJob,
    Entry,
    NameClashes,
    Problem,
    base_name,
    local_problem,
    object_entry,
)
from aioflux.cli._text import describe, one_line
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    import threading

    from aioflux.cli._arguments import UriOrPath
    from aioflux.cli._cp.local_files import FileThreads
    from aioflux.cli._cp.plan import JobOrProblem
    from aioflux.store import Store

_WALK_ITEMS = 1000
_MAX_HEADS = 64


@dataclass(frozen=True, slots=True)
class Destination:
    """The TARGET argument, and the rule for the names of copies."""

    argument: UriOrPath | None
    """None for standard output."""
    is_directory: bool
    """True: copies get names below TARGET. False: TARGET is the name of the only copy."""

    def job(self, source: str, entry: Entry, relative: str) -> JobOrProblem:
        """Return the job of one source; `relative` is its name if TARGET is a directory."""
        read_from, size, mtime_ns = entry.item, entry.size, entry.mtime_ns
        if self.argument is None:
            return CopyJob(source, "standard output", read_from, "", size)
        if self.argument.is_local:
            path = self.argument.path
            if self.is_directory:
                if problem := local_problem(relative):
                    return Problem(f"cannot copy {one_line(source)} to local disk: {problem}")
                path = f"{path.rstrip('/')}/{relative}"
            if not mtime_ns % SECOND and time.time_ns() < mtime_ns + SECOND:
                mtime_ns = 0  # a service with whole seconds may give the next write the same time
            return CopyJob(source, path, read_from, path, size, mtime_ns)
        location = self.argument.location
        key = as_prefix(location.key) + relative if self.is_directory else location.key
        uri = f"{location.scheme}://{location.bucket}/{key}"
        return CopyJob(source, uri, read_from, key, size, mtime_ns)


def reject_copy_into_itself(source: UriOrPath, target: Destination) -> None:
    """Reject a target below the source: such a copy would never end.

    Raises:
        ValueError: The target is the source, or below it.
    """
    if target.argument is not None and is_below(target.argument, source):
        raise ValueError(f"cannot copy {source.text} into itself ({target.argument.text})")


def is_below(argument: UriOrPath, other: UriOrPath) -> bool:
    """Return whether an argument is the same as another one, or below it."""
    inner, outer = _common_prefix(argument), _common_prefix(other)
    return inner is not None and outer is not None and inner.startswith(outer)


def _common_prefix(argument: UriOrPath | None) -> str | None:
    """Return the prefix of everything below an argument; None for standard output."""
    if argument is None:
        return None
    if argument.is_local:
        return f"file:{os.path.realpath(argument.path).rstrip('/')}/"
    location = argument.location
    return f"{location.scheme}://{location.bucket}/{as_prefix(location.key)}"


def _job_below(source: UriOrPath, target: Destination) -> Callable[[str, Entry, str], JobOrProblem]:
    """Return `target.job`, with a `Problem` for jobs that would overwrite the source itself.

    Example: the source is `q/ov` and the target `q`. The copy of `q/ov/ov/x` would be `q/ov/x`,
    which is below the source.
    """
    inner, outer = _common_prefix(source), _common_prefix(target.argument)
    assert inner is not None
    own = inner[len(outer) :] if outer is not None and inner.startswith(outer) else None

    def job(name: str, entry: Entry, relative: str) -> JobOrProblem:
        found = target.job(name, entry, relative)
        if own is None or isinstance(found, Problem) or not relative.startswith(own):
            return found
        return Problem(
            f"cannot copy {one_line(name)} to {one_line(found.target)}: the target is below "
            f"{one_line(source.text)}, which is being copied; copy to another prefix first"
        )

    return job


class TreeJobs:
    """The jobs of everything below one source, with the rules for names that cannot be copied.

    Args:
        source: The directory or prefix.
        target: The directory or prefix of the copies.
        names: The names to copy.
        is_wanted: Whether an entry with this name must be copied. If it is given, SOURCE must be a
            directory or prefix.
    """

    def __init__(
        self,
        source: UriOrPath,
        target: Destination,
        names: NameFilter,
        is_wanted: Callable[[str, Entry], Awaitable[bool]] | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._names = names
        self._is_wanted = is_wanted
        self._job_of = _job_below(source, target)

    async def list_prefix(self, store: Store) -> AsyncGenerator[JobOrProblem, None]:
        """Yield a job for every object below the prefix, or for the object of this name.

        Raises:
            NotFoundError: Neither the object nor an object below it exists.
        """
        key = self._source.location.key
        prefix = as_prefix(key)
        clashes = NameClashes()
        is_local = self._target.argument is not None and self._target.argument.is_local
        found = False
        pages = store.list_pages(prefix)
        async with aclosing(pages):
            async for page in pages:
                found = True
                for meta in page:
                    relative = meta.key[len(prefix) :]
                    if not (relative or meta.size) or not self._names.admits(relative):
                        continue  # or the placeholder that consoles create for the prefix itself
                    if (job := await self._job(meta.uri, object_entry(meta), relative)) is None:
                        continue
                    # An object that is not copied cannot clash with another name.
                    is_new = is_local and isinstance(job, CopyJob)
                    if is_new and (other := clashes.add(relative)):
                        file = one_line(join_uri(store.uri, prefix + other))
                        job = Problem(
                            f"cannot copy {one_line(meta.uri)}: {file} is a file where it needs a "
                            "directory; copy one of the two to another directory"
                        )
                    yield job
        if found:
            return
        single = await find(store, key) if key != prefix else None
        if single is None:
            uri = str(self._source.location)
            raise NotFoundError(f"there is no object below {uri}; {self._source.hint()}", uri=uri)
        if self._is_wanted is not None:
            raise ValueError(f"{self._source.text} is an object, not a prefix; use cp for it")
        yield self._target.job(single.uri, object_entry(single), base_name(key))

    async def list_directory(
        self, threads: FileThreads, *, may_be_empty: bool = False
    ) -> AsyncGenerator[JobOrProblem, None]:
        """Yield a job for every file below the local directory.

        Raises:
            ValueError: There is no file below the directory, and `may_be_empty` is False.
        """
        root = self._source.path.rstrip("/") or "/"
        found = walk(root, threads.stop, self._names)
        is_empty = True
        while items := await threads.run(lambda: list(islice(found, _WALK_ITEMS))):
            is_empty = False
            for item in items:
                if isinstance(item, Problem):
                    yield item
                    continue
                relative, entry = item
                if (job := await self._job(str(entry.item), entry, relative)) is not None:
                    yield job
        if is_empty and not may_be_empty:
            which = " that --include and --exclude admit" if self._names != NameFilter() else ""
            raise ValueError(f"there is no file{which} below {one_line(self._source.text)}")

    async def _job(self, name: str, entry: Entry, relative: str) -> JobOrProblem | None:
        if self._is_wanted is not None and not await self._is_wanted(relative, entry):
            return None
        return self._job_of(name, entry, relative)


def walk(
    root: str, stop: threading.Event, names: NameFilter
) -> Iterator[tuple[str, Entry] | Problem]:
    """Yield (path below `root`, entry) of every file below a directory, in key order.

    Links to files are followed. Links to directories and special files are yielded as problems.
    Temporary files of unfinished writes, and names that the filter excludes, are skipped.
    """
    pending = [("", root)]
    while pending:
        base, directory = pending.pop()
        if not base.endswith("/") and base:
            if names.admits(base):
                yield _measure(base, directory)
            continue
        try:
            with os.scandir(directory) as found:
                entries = [each for each in found if not is_temporary(each.name)]
        except OSError as exc:
            message = f"cannot list {one_line(directory)}: {exc.strerror}"
            yield Problem(message, hides_names=True)
            continue
        if stop.is_set():
            return
        below = [
            (base + each.name + ("/" if each.is_dir(follow_symlinks=False) else ""), each.path)
            for each in entries
            if not names.excludes(base + each.name)
        ]
        pending += sorted(below, reverse=True)


def _measure(relative: str, path: str) -> tuple[str, Entry] | Problem:
    try:
        status = os.stat(path)
    except OSError as exc:
        return Problem(f"cannot read {one_line(path)}: {exc.strerror}")
    if stat.S_ISDIR(status.st_mode):
        return Problem(
            f"did not follow {one_line(path)}: it is a link to a directory; copy that directory by "
            "its own name"
        )
    if not stat.S_ISREG(status.st_mode):
        return Problem(f"cannot read {one_line(path)}: it is not a regular file")
    return relative, file_entry(path, status)


async def list_files(
    sources: Sequence[UriOrPath], target: Destination, used: dict[str, str]
) -> AsyncGenerator[JobOrProblem, None]:
    """Yield a job, or a problem, for each of several local files."""
    for source in sources:
        try:
            status = os.stat(source.path)
        except OSError as exc:
            hint = f"; {source.hint()}" if isinstance(exc, FileNotFoundError) else ""
            yield Problem(f"cannot read {one_line(source.text)}: {exc.strerror}{hint}")
            continue
        if stat.S_ISDIR(status.st_mode):
            yield Problem(f"{one_line(source.text)} is a directory; use -r to copy what is below")
            continue
        entry = file_entry(source.path, status)
        job = target.job(source.path, entry, base_name(source.path))
        yield _reject_reused_name(job, used)


async def list_objects(
    store: Store, sources: Sequence[UriOrPath], target: Destination, used: dict[str, str]
) -> AsyncGenerator[JobOrProblem, None]:
    """Yield a job, or a problem, for each of several objects of one store."""

    async def find_job(source: UriOrPath) -> JobOrProblem:
        key = source.location.key
        not_an_object = Problem(
            f"{one_line(source.text)} is a bucket or prefix; use -r to copy what is below"
        )
        if not source.may_be_object():
            return not_an_object
        try:
            meta = source.meta or await store.head(key)
        except NotFoundError as exc:
            if source.is_directory():
                return not_an_object
            text = await source.explain_missing(store, key, "use -r to copy them")
            return Problem(text or describe(exc))
        except StorageError as exc:
            return Problem(describe(exc))
        if key.endswith("/") and not meta.size:
            return not_an_object  # the placeholder that consoles create for a prefix
        return target.job(meta.uri, object_entry(meta), base_name(key))

    jobs = bounded_map(find_job, sources, max_in_flight=_MAX_HEADS)
    async with aclosing(jobs):
        async for job in jobs:
            yield _reject_reused_name(job, used)


def _reject_reused_name(job: JobOrProblem, used: dict[str, str]) -> JobOrProblem:
    """Reject a job whose target is its source, or the target of an earlier source.

    Args:
        job: The job.
        used: Source of each target so far; the job is added.
    """
    if isinstance(job, Problem) or not job.write_to:
        return job
    between_files = isinstance(job.read_from, str) and job.write_to == job.target
    if job.source == job.target or (between_files and _is_same_file(job.source, job.write_to)):
        return Problem(f"{one_line(job.source)} and {one_line(job.target)} are the same")
    other = used.setdefault(job.target, job.source)
    if other != job.source:
        return Problem(
            f"cannot copy {one_line(job.source)} to {one_line(job.target)}: {one_line(other)} "
            "has the same name there; copy one of the two to another name"
        )
    return job


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
