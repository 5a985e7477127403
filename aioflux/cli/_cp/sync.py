"""`aioflux sync`: a copy of everything that differs, and the deletion of what is not in the source.

    names at the target -> each name of the source: compare -> jobs of `cp` -> what is left: delete

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
from aioflux.cli._cp.plan import Problem, differs, object_entry
from aioflux.cli._cp.sources import Destination, TreeJobs, is_below, reject_copy_into_itself, walk
from aioflux.cli._event_loop import run
from aioflux.cli._output import print_lines, print_notice
from aioflux.cli._text import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aioflux.cli._arguments import UriOrPath
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

    --delete deletes last, and only what still is as it was listed; before that, only files in the
    place of a needed directory, or in a directory in the place of a needed file. If a listing was
    incomplete or a copy failed, it does not delete at the end. It keeps what --exclude names, and
    placeholders whose names end in "/". A SOURCE prefix without objects is an error; so is, with
    --delete, an empty SOURCE directory.

    After an interruption, the next run continues with what is missing. A file that changes while it
    is read is an error, and its old copy is kept.

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
        if source.is_local:
            # With `--delete`, a disk that is not mounted would delete everything.
            found = jobs.list_directory(self._threads, may_be_empty=not deletes)
            await self._run(self._files, self._note_problems(found))
        else:
            store = source.open()[0]
            await self._run(StoreObjects(store), self._note_problems(jobs.list_prefix(store)))
        if deletes and (not self._is_complete or self._report.num_failed):
            print_notice(
                "what only TARGET has was not deleted: not everything below SOURCE was copied"
            )
        elif deletes:
            await self._delete(self._extra)
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
            if self._goal.is_local and name.endswith("/"):
                path = f"{self._goal.path.rstrip('/')}/{name}"
                return not os.path.isdir(path)  # noqa: ASYNC240  one call
            if self._deletes and self._goal.is_local:
                await self._delete_conflicts(name)
            return True
        is_other = differs(source, target)
        if self._checksum and source.size == target.size:
            first, second = await self._crc32c(source), await self._crc32c(target)
            is_other = first is None or first != second
            if not is_other and isinstance(target.item, str) and not self._options.dry_run:
                with suppress(OSError):  # without it, the next run compares the checksums again
                    os.utime(target.item, ns=(source.mtime_ns, source.mtime_ns))
        self._num_same += not is_other
        return is_other

    async def _crc32c(self, entry: Entry) -> int | None:
        if not isinstance(entry.item, str):
            return entry.crc32c
        try:
            return await self._threads.run(file_crc32c, entry.item)
        except (OSError, ValueError):
            return None  # the copy fails with this error

    async def _delete_conflicts(self, name: str) -> None:
        """Delete files that have the name of a needed directory, or are below a needed name."""
        parts = name.split("/")
        parents = ("/".join(parts[:number]) for number in range(1, len(parts)))
        in_the_way = [parent for parent in parents if parent in self._extra]
        for below in self._names[bisect_left(self._names, f"{name}/") :]:
            if not below.startswith(f"{name}/"):
                break
            if below in self._extra:
                in_the_way.append(below)
        if in_the_way:
            await self._delete({each: self._extra.pop(each) for each in in_the_way})
            if not self._options.dry_run:
                path = f"{self._goal.path.rstrip('/')}/{name}"
                await self._threads.run(remove_empty_tree, path)

    async def _note_problems(
        self, jobs: AsyncGenerator[JobOrProblem, None]
    ) -> AsyncGenerator[JobOrProblem, None]:
        async with aclosing(jobs):
            async for job in jobs:
                self._is_complete &= not isinstance(job, Problem)
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


def _name(entry: Entry) -> str:
    return entry.item if isinstance(entry.item, str) else entry.item.uri
