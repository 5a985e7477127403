"""`aioflux sync`: a copy of everything that differs, and the deletion of what is not in the source.

    names at the target -> each name of the source: compare -> jobs of `cp`
    -> what is left: delete -> jobs in whose way a file or directory was

All names of the target are listed before anything is written, about 500 bytes for each.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._arguments import Exclude, Include, NameFilter, as_prefix, parse_arguments
from aioflux.cli._cp.command import (
    CacheControl,
    ContentType,
    CopyOptions,
    CopyRun,
    Metadata,
    StorageClass,
    parse_attributes,
)
from aioflux.cli._cp.copier import StoreObjects
from aioflux.cli._cp.local_files import file_crc32c, remove_empty_tree
from aioflux.cli._cp.plan import CopyJob, Problem, differs, object_entry
from aioflux.cli._cp.sources import Destination, TreeJobs, is_below, reject_copy_into_itself, walk
from aioflux.cli._event_loop import run
from aioflux.cli._output import print_lines, print_notice
from aioflux.cli._text import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aioflux.cli._arguments import UriOrPath
    from aioflux.cli._cp.copier import CopySource
    from aioflux.cli._cp.plan import Entry, JobOrProblem

DIFFERENT = 3
"""Exit status of a dry run that found differences."""
_DELETE_OBJECTS = 1000


def sync(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory or prefix.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Directory or prefix.")],
    *,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Compare by crc32c; local files are read.")
    ] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is below TARGET and not below SOURCE.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; status 3 if anything.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    content_type: ContentType = "",
    cache_control: CacheControl = "",
    storage_class: StorageClass = "",
    metadata: Metadata = None,
) -> int:
    """Copy what is below SOURCE and is not the same below TARGET, in this direction only.

    Names and copies are those of "cp -r". A copy is the same if it has the same size and is not
    older than its source: an object was written after the file was last changed, its attributes
    included; a file has the time of its object, which copies of objects have. If both sides list
    a crc32c, it decides. With --checksum it always decides, and local files are read; an object
    without a crc32c is copied. The clock of this machine must be right to a second or so.

    --content-type, --cache-control, --storage-class and --metadata are for the objects that this
    run writes; they are not compared.

    --delete deletes after all copies were made, and only what still is as it was listed. Then it
    copies what a file or directory was in the way of. If a listing was incomplete or a copy failed,
    it deletes nothing. It keeps what --exclude names, and placeholders whose names end in "/". A
    SOURCE prefix without objects is an error; so is, with --delete, an empty SOURCE directory.

    After an interruption, the next run continues with what is missing. A file that changes while it
    is copied is copied again; if it changes each of three times, it is an error.

    Exit status of --dry-run: 0 if there is nothing to do, 3 if there is.

    Examples: aioflux sync data gs://bucket/data; aioflux sync --delete gs://bucket/data data
    """
    origin, goal = parse_arguments([source, target])
    names = NameFilter.parse(include, exclude)
    destination = Destination(goal, True)
    attributes = parse_attributes(
        destination, content_type, cache_control, storage_class, metadata or []
    )
    options = CopyOptions(dry_run=dry_run, keeps_times=True, names=names, attributes=attributes)

    async def work() -> int:
        if origin.is_local and not origin.is_directory():
            raise ValueError(
                f"{origin.text} is not a directory; {origin.hint('use cp for a file')}"
            )
        async with SyncRun(destination, options, checksum=checksum) as copy:
            await copy.sync(origin, deletes=delete)
        return copy.finish()

    return run(work)


class SyncRun(CopyRun):
    """One run of the command: a copy, with the names of the target compared."""

    def __init__(self, target: Destination, options: CopyOptions, *, checksum: bool) -> None:
        super().__init__(target, options)
        assert target.argument is not None
        self._goal: UriOrPath = target.argument
        self._checksum = checksum
        self._deletes = False
        self._is_complete = True
        self._extra: dict[str, Entry] = {}
        self._names: list[str] = []
        self._blocked: list[CopyJob] = []
        """Copies in whose way a file or directory is, which `--delete` deletes."""
        self._num_same = 0
        self._num_deleted = 0

    async def sync(self, source: UriOrPath, *, deletes: bool) -> None:
        """Copy what differs; with `deletes`, delete what the source does not have."""
        reject_copy_into_itself(source, self._target)
        if deletes and is_below(source, self._goal):
            raise ValueError(
                f"sync --delete would delete {source.text}, which is below {self._goal.text}; "
                "leave out --delete, or sync to another prefix"
            )
        if self._goal.is_file():
            raise ValueError(f"{self._goal.text} is a file; sync needs a directory")
        self._deletes = deletes
        self._extra = await self._list_target()
        self._names = list(self._extra)
        jobs = TreeJobs(source, self._target, self._options.names, self._is_wanted)
        objects: CopySource = self._files
        if source.is_local:
            # With `--delete`, a disk that is not mounted would delete everything.
            found = jobs.list_directory(self._threads, may_be_empty=not deletes)
        else:
            store = source.open()[0]
            objects, found = StoreObjects(store), jobs.list_prefix(store)
        await self._run(objects, self._set_aside(found))
        self._fail_blocked()
        if deletes and (not self._is_complete or self._report.num_failed):
            print_notice(
                "what only TARGET has was not deleted: not everything below SOURCE was copied"
            )
        elif deletes:
            await self._delete(self._extra)
            if self._blocked:
                await self._run(objects, self._unblock())
            if self._goal.is_local and not self._options.dry_run:
                paths = [str(each.item) for each in self._extra.values()]
                self._files.remove_empty_parents(self._goal.path, paths)

    def finish(self) -> int:
        """Print the summary, and return the exit status."""
        progress = self._progress
        text = progress.summary(
            self._plan_verb if self._options.dry_run else self._verb,
            is_timed=not self._options.dry_run and progress.num_objects > 0,
        )
        deleted = "to delete" if self._options.dry_run else "deleted"
        status = self._report.finish(
            f"{text}, {self._num_deleted:,} {deleted}, {self._num_same:,} unchanged"
        )
        is_different = progress.num_objects or self._num_deleted
        return DIFFERENT if self._options.dry_run and not status and is_different else status

    async def _list_target(self) -> dict[str, Entry]:
        """Return what is below the target, by name and sorted by name.

        Raises:
            ValueError: A directory could not be listed.
        """
        names = self._options.names
        if not self._goal.is_local:
            store, key = self._goal.open()
            prefix = as_prefix(key)
            listing = await store.list_all(prefix)
            return {
                name: object_entry(meta)
                for meta in listing
                if names.admits(name := meta.key[len(prefix) :])
            }
        if not os.path.isdir(self._goal.path):  # noqa: ASYNC240  one call
            return {}
        found = await self._threads.run(
            lambda: list(walk(self._goal.path.rstrip("/") or "/", self._threads.stop, names))
        )
        for item in found:
            if isinstance(item, Problem) and item.hides_names:
                raise ValueError(item.message)
        return dict(sorted(item for item in found if not isinstance(item, Problem)))

    async def _is_wanted(self, name: str, source: Entry) -> bool:
        """Return whether an object or file must be copied, and note that the source has it."""
        target = self._extra.pop(name, None)
        if target is None:
            if not (self._goal.is_local and name.endswith("/")):
                return True
            path = f"{self._goal.path.rstrip('/')}/{name}"
            if not os.path.isdir(path):  # noqa: ASYNC240  one call
                return True
            self._files.keep_directory(path)
            return False
        is_other = differs(source, target)
        if self._checksum and source.size == target.size:
            first, second = await self._crc32c(source), await self._crc32c(target)
            is_other = first is None or first != second
            if not is_other and isinstance(target.item, str) and not self._options.dry_run:
                with suppress(OSError):  # without it, the next run compares the checksums again
                    times = (source.mtime_ns, source.mtime_ns)
                    os.utime(target.item, ns=times, follow_symlinks=False)
        self._num_same += not is_other
        return is_other

    async def _crc32c(self, entry: Entry) -> int | None:
        if not isinstance(entry.item, str):
            return entry.crc32c
        try:
            return await self._threads.run(file_crc32c, entry.item)
        except (OSError, ValueError):
            return None  # the copy fails with this error

    async def _set_aside(
        self, jobs: AsyncGenerator[JobOrProblem, None]
    ) -> AsyncGenerator[JobOrProblem, None]:
        """Yield the jobs in whose way nothing is that `--delete` deletes; note problems."""
        async with aclosing(jobs):
            async for job in jobs:
                self._is_complete &= not isinstance(job, Problem)
                if isinstance(job, CopyJob) and self._is_blocked(job):
                    self._blocked.append(job)
                else:
                    yield job

    def _is_blocked(self, job: CopyJob) -> bool:
        """Return whether a directory is in the place of the file, or a file of a directory."""
        if not (self._deletes and self._goal.is_local):
            return False
        return _is_own_directory(job.write_to) or bool(self._in_the_way(job))

    def _in_the_way(self, job: CopyJob) -> list[str]:
        """Return the listed names above a job's target and below it."""
        name = job.write_to[len(self._goal.path.rstrip("/")) + 1 :]
        parts = name.split("/")
        parents = ("/".join(parts[:number]) for number in range(1, len(parts)))
        found = [parent for parent in parents if self._was_listed(parent)]
        for below in self._names[bisect_left(self._names, f"{name}/") :]:
            if not below.startswith(f"{name}/"):
                break
            found.append(below)
        return found

    def _was_listed(self, name: str) -> bool:
        at = bisect_left(self._names, name)
        return at < len(self._names) and self._names[at] == name

    def _fail_blocked(self) -> None:
        """Report the copies whose way stays blocked: by what SOURCE has, or after another error."""
        is_incomplete = not self._is_complete or self._report.num_failed > 0
        for job in self._blocked:
            needed = [each for each in self._in_the_way(job) if each not in self._extra]
            if needed or is_incomplete:
                name = f"below SOURCE: {one_line(needed[0])}" if needed else "not deleted"
                self._report.fail(
                    f"cannot copy {one_line(job.source)} to {one_line(job.target)}: a file is "
                    f"where it needs a directory, or the reverse, and it is {name}"
                )

    async def _unblock(self) -> AsyncGenerator[JobOrProblem, None]:
        """Yield the jobs in whose way nothing is any more."""
        for job in self._blocked:
            if not self._options.dry_run and _is_own_directory(job.write_to):
                await self._threads.run(remove_empty_tree, job.write_to)
            yield job

    async def _delete(self, extra: dict[str, Entry]) -> None:
        """Delete entries of the target; report those that changed after they were listed."""
        # The placeholders that consoles create are no files.
        found = [each for name, each in sorted(extra.items()) if name and not name.endswith("/")]
        if self._options.dry_run:
            self._num_deleted += len(found)
            await print_lines("\n".join(f"would delete {one_line(_name(each))}" for each in found))
            return
        target = self._copy_target()
        for start in range(0, len(found), _DELETE_OBJECTS):
            page = found[start : start + _DELETE_OBJECTS]
            outcomes = await target.remove_entries(page)
            self._num_deleted += outcomes.count(None)
            for error in outcomes:
                if error is not None:
                    self._report.fail(error)


def _is_own_directory(path: str) -> bool:
    """Return whether a file needs the place of a directory, which is no link."""
    return not path.endswith("/") and os.path.isdir(path) and not os.path.islink(path)


def _name(entry: Entry) -> str:
    return entry.item if isinstance(entry.item, str) else entry.item.uri
