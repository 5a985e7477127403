"""`aioflux cp` and `aioflux mv`: options, and one run of a command."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Self, cast

import typer

from aioflux._concurrency.fan_out import bounded_batches
from aioflux.cli._arguments import Exclude, Include, NameFilter, expand, parse_arguments
from aioflux.cli._cp.copier import Copier, StandardStreams, StoreObjects
from aioflux.cli._cp.local_files import FileThreads, LocalFiles, remove_empty_tree
from aioflux.cli._cp.plan import CopyJob, Entry, Problem
from aioflux.cli._cp.sources import (
    Destination,
    TreeJobs,
    list_files,
    list_objects,
    reject_copy_into_itself,
)
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines, print_notice
from aioflux.cli._progress import CommandProgress
from aioflux.cli._text import one_line
from aioflux.errors import AiofluxError
from aioflux.options import WriteAttributes

if TYPE_CHECKING:
    from types import TracebackType

    from aioflux.cli._arguments import UriOrPath
    from aioflux.cli._cp.copier import CopySource, CopyTarget
    from aioflux.cli._cp.plan import JobOrProblem

_MAX_LOOKUPS = 64


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...", help="Uris or paths; - is standard input.", show_default=False
    ),
]
Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="Uri or path; - is standard output.", show_default=False),
]
Recursive = Annotated[
    bool, typer.Option("-r", "--recursive", help="Copy everything below the one SOURCE.")
]
NoClobber = Annotated[
    bool, typer.Option("--no-clobber", "-n", help="Do not overwrite existing files or objects.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be copied, and copy nothing.")
]
ContentType = Annotated[
    str, typer.Option("--content-type", help="Media type; by default by the name's extension.")
]
CacheControl = Annotated[
    str, typer.Option("--cache-control", help='Rules for caches, such as "max-age=60".')
]
StorageClass = Annotated[
    str, typer.Option("--storage-class", help='By its name in the service, such as "NEARLINE".')
]
Metadata = Annotated[
    list[str] | None, typer.Option("--metadata", metavar="NAME=VALUE", help="Can be repeated.")
]


def cp(
    sources: Sources = (),  # type: ignore[assignment]  # typer passes a list
    target: Target = "",
    *,
    recursive: Recursive = False,
    no_clobber: NoClobber = False,
    dry_run: DryRun = False,
    include: Include = None,
    exclude: Exclude = None,
    content_type: ContentType = "",
    cache_control: CacheControl = "",
    storage_class: StorageClass = "",
    metadata: Metadata = None,
) -> int:
    """Copy objects and files; names follow "aws s3 cp".

    TARGET is a directory if it ends in "/", is a bucket, or is an existing local directory: each
    copy keeps the last segment of its name. Otherwise TARGET is the new name. Several SOURCEs can
    be written to standard output, one after the other. Without -r, SOURCE may be a pattern.

    With -r, everything below SOURCE is copied below TARGET with the same relative names, whether
    or not either ends in "/": "cp -r dir gs://b/p" creates "gs://b/p/..." from "dir/...". An empty
    object whose key ends in "/" becomes a directory; empty directories are not copied.

    For each of the following an error is printed, the other copies are made, and the exit status
    is 1: links to directories, which are not followed; files that are not regular, such as pipes;
    keys whose path would be outside a local TARGET ("..", "/...", through a link); keys that need
    a directory with the name of another file; copies that would be written below SOURCE itself.

    Existing objects and files are overwritten; with -n they are skipped, and a line names those
    that are known to differ. Copies appear whole or not at all; a local file that is overwritten
    keeps its mode, and a copy of an object has its time. The bytes of objects are verified with
    crc32c when they are read and when they are written. Copies within a bucket keep all metadata.
    Copies to another bucket do not keep content language and storage class.

    --content-type, --cache-control, --storage-class and --metadata are for all written objects;
    with them, copies within a bucket are downloaded and uploaded.

    Examples: aioflux cp "gs://bucket/train/*.tar" data/;
    aioflux cp -r --exclude .git . gs://bucket/code
    """
    names = _filter(include, exclude, recursive=recursive)
    origins, destination = _parse(sources, target, recursive=recursive)
    attributes = parse_attributes(
        destination, content_type, cache_control, storage_class, metadata or []
    )
    options = CopyOptions(
        no_clobber=no_clobber, dry_run=dry_run, names=names, attributes=attributes
    )
    return _run(origins, destination, options, recursive=recursive)


def mv(
    sources: Sources = (),  # type: ignore[assignment]  # typer passes a list
    target: Target = "",
    *,
    recursive: Recursive = False,
    no_clobber: NoClobber = False,
    dry_run: DryRun = False,
    include: Include = None,
    exclude: Exclude = None,
) -> int:
    """Move objects and files: copy as "cp" does, then delete each source that was copied.

    Within a bucket, the service copies the bytes. A source is deleted after its copy was verified,
    and only in the generation that was copied: if it was overwritten meanwhile, it is kept, and an
    error is printed. What could not be copied is kept.

    Examples: aioflux mv gs://bucket/a.bin gs://bucket/b.bin;
    aioflux mv "gs://bucket/in/*.json" gs://bucket/done/
    """
    names = _filter(include, exclude, recursive=recursive)
    origins, destination = _parse(sources, target, recursive=recursive)
    if None in origins or destination.argument is None:
        raise typer.BadParameter("mv does not move standard input or output; use cp")
    options = CopyOptions(no_clobber=no_clobber, dry_run=dry_run, names=names, moves=True)
    return _run(origins, destination, options, recursive=recursive)


def parse_attributes(
    target: Destination,
    content_type: str,
    cache_control: str,
    storage_class: str,
    metadata: Sequence[str],
) -> WriteAttributes:
    """Return the attributes of all written objects that options give.

    Raises:
        typer.BadParameter: The target is not a store, or metadata is not NAME=VALUE.
    """
    given = {
        "content_type": content_type,
        "cache_control": cache_control,
        "storage_class": storage_class,
        "metadata": dict(_split_metadata(text) for text in metadata),
    }
    attributes = {name: value for name, value in given.items() if value}
    if attributes and (target.argument is None or target.argument.is_local):
        names = " and ".join(f"--{name.replace('_', '-')}" for name in attributes)
        raise typer.BadParameter(f"{names} is for objects, and TARGET is none")
    return cast("WriteAttributes", attributes)


def _split_metadata(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--metadata is NAME=VALUE, not {text!r}")
    return name, value


def _filter(include: list[str] | None, exclude: list[str] | None, *, recursive: bool) -> NameFilter:
    if (include or exclude) and not recursive:
        raise typer.BadParameter("--include and --exclude are for -r")
    return NameFilter.parse(include, exclude)


def _run(
    origins: list[UriOrPath | None],
    destination: Destination,
    options: CopyOptions,
    *,
    recursive: bool,
) -> int:
    async def work() -> int:
        async with CopyRun(destination, options) as copy:
            if recursive:
                assert origins[0] is not None
                await copy.copy_below(origins[0])
            else:
                await copy.copy_each(origins)
        return copy.finish()

    return run(work)


def _parse(
    sources: list[str], target: str, *, recursive: bool
) -> tuple[list[UriOrPath | None], Destination]:
    """Parse the arguments, and reject combinations without a meaning.

    The source is None for standard input.
    """
    if not (sources and target):
        # Not by typer, which takes one argument for the TARGET.
        what = "the TARGET is missing" if sources or target else "SOURCE and TARGET are missing"
        raise typer.BadParameter(f"{what}; write SOURCE... TARGET")
    if recursive and (len(sources) > 1 or sources == ["-"]):
        raise typer.BadParameter("-r takes one SOURCE, which is not standard input")
    if recursive and target == "-":
        raise typer.BadParameter("-r cannot write to standard output")
    if sources.count("-") > 1:
        raise typer.BadParameter("standard input can be read only once")
    named = [text for text in [*sources, target] if text != "-"]
    parsed = iter(parse_arguments(named))
    *origins, goal = [None if text == "-" else next(parsed) for text in [*sources, target]]
    is_directory = goal is not None and (recursive or goal.is_directory())
    if len(sources) > 1 and goal is not None and not is_directory:
        raise typer.BadParameter('with several SOURCEs, TARGET must be a directory: end it in "/"')
    if None in origins and is_directory:
        raise typer.BadParameter(
            'standard input has no name: TARGET must be a file or object, without a "/" at its end'
        )
    return origins, Destination(goal, is_directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyOptions:
    """Options of one run of `cp`, `mv` or `sync`."""

    no_clobber: bool = False
    """Do not overwrite existing files or objects."""
    dry_run: bool = False
    """Print what would be done, and do nothing."""
    moves: bool = False
    """Delete each source that was copied."""
    keeps_times: bool = False
    """Give local copies of files the time of their source, as copies of objects have it."""
    names: NameFilter = field(default_factory=NameFilter)
    """Names to copy from below a source."""
    attributes: WriteAttributes = field(default_factory=WriteAttributes)
    """Attributes that all written objects get."""


class CopyRun:
    """One run of the command: open stores, copies, and counts for the summary."""

    def __init__(self, target: Destination, options: CopyOptions) -> None:
        self._target = target
        self._options = options
        self._verb = "moved" if options.moves else "copied"
        self._progress = CommandProgress(num_listings=1)
        self._report = Report()
        self._threads = FileThreads()
        goal = target.argument
        root = goal.path if goal is not None and goal.is_local and target.is_directory else None
        self._files = LocalFiles(
            self._threads,
            no_clobber=options.no_clobber,
            root=root,
            keeps_times=options.keeps_times,
            is_durable=options.moves,
        )
        self._stack = AsyncExitStack()

    @property
    def _plan_verb(self) -> str:
        return "would move" if self._options.moves else "would copy"

    async def __aenter__(self) -> Self:
        # If the data is printed on the terminal, a progress bar would be mixed with it.
        is_data_shown = self._target.argument is None and sys.stdout.isatty()
        shown = self._progress.show(is_wanted=not (self._options.dry_run or is_data_shown))
        self._stack.enter_context(shown)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)
        self._files.remove_empty_directories()
        if error is not None and self._progress.num_objects and not self._options.dry_run:
            print_notice(self._progress.summary(f"Stopped; {self._verb} at least"))

    def finish(self) -> int:
        """Print the summary, and return the exit status."""
        if self._options.dry_run:
            return self._report.finish(self._progress.summary(self._plan_verb, is_timed=False))
        if self._target.argument is None and not self._report.num_failed:
            return 0
        return self._report.finish(self._progress.summary(self._verb))

    async def copy_below(self, source: UriOrPath) -> None:
        """Copy everything below a directory or prefix, or the one file or object of this name."""
        reject_copy_into_itself(source, self._target)
        goal = self._target.argument
        if goal is not None and goal.is_file():
            raise ValueError(f"{goal.text} is a file; -r needs a directory")
        jobs = TreeJobs(source, self._target, self._options.names)
        if not source.is_local:
            store = source.open()[0]
            await self._run(StoreObjects(store), jobs.list_prefix(store))
        elif source.is_directory():
            await self._run(self._files, jobs.list_directory(self._threads))
            if self._options.moves and not self._options.dry_run:
                await self._threads.run(remove_empty_tree, source.path)
        else:
            await self.copy_each([source])

    async def copy_each(self, sources: Sequence[UriOrPath | None]) -> None:
        """Copy single files and objects, in the given order; None is standard input."""
        used: dict[str, str] = {}
        expanded = [each for source in sources async for each in self._expand(source)]
        goal = self._target
        if len(expanded) > 1 and goal.argument is not None and not goal.is_directory:
            raise ValueError(
                f"the pattern matches {len(expanded):,} names, and TARGET is one: end it in '/'"
            )
        groups = [(root, list(group)) for root, group in groupby(expanded, key=_root)]
        self._progress.num_listings = len(groups)
        for root, group in groups:
            named = [source for source in group if source is not None]
            if not named:
                await self._run(StandardStreams(), self._stdin())
            elif root:
                store = named[0].open()[0]
                jobs = list_objects(store, named, self._target, used)
                await self._run(StoreObjects(store), jobs)
            else:
                await self._run(self._files, list_files(named, self._target, used))

    async def _expand(self, source: UriOrPath | None) -> AsyncGenerator[UriOrPath | None, None]:
        """Yield the matches of a pattern, or the source."""
        if source is None:
            yield None
            return
        try:
            async with aclosing(expand(source)) as found:
                async for each in found:
                    yield each
        except (AiofluxError, ValueError) as exc:
            self._report.fail(exc)

    async def _stdin(self) -> AsyncGenerator[JobOrProblem, None]:
        yield self._target.job("standard input", Entry("", -1, 0), "")

    def _copy_target(self, source: CopySource | None = None) -> CopyTarget:
        goal = self._target.argument
        if goal is None:
            return StandardStreams()
        if goal.is_local:
            return self._files
        return StoreObjects(
            goal.open()[0],
            no_clobber=self._options.no_clobber,
            attributes=self._options.attributes,
            source=source.store if isinstance(source, StoreObjects) else None,
        )

    async def _run(self, source: CopySource, jobs: AsyncGenerator[JobOrProblem, None]) -> None:
        if self._options.dry_run:
            await self._print_plan(jobs)
            return
        target = self._copy_target(source)
        copier = Copier(source, target, self._progress, self._report, moves=self._options.moves)
        await copier.run(jobs)

    async def _print_plan(self, jobs: AsyncGenerator[JobOrProblem, None]) -> None:
        """Print a line for each object that would be copied."""
        target = self._copy_target() if self._options.no_clobber else None

        async def look_up(job: JobOrProblem) -> tuple[JobOrProblem, bool]:
            is_kept = target is not None and isinstance(job, CopyJob) and await target.keeps(job)
            return job, is_kept

        async with aclosing(jobs):
            looked_up = bounded_batches(look_up, jobs, max_in_flight=_MAX_LOOKUPS)
            async with aclosing(looked_up):
                async for batch in looked_up:
                    lines = (self._plan_line(job, is_kept=is_kept) for job, is_kept in batch)
                    await print_lines("\n".join(filter(None, lines)))

    def _plan_line(self, job: JobOrProblem, *, is_kept: bool) -> str:
        """Count one object of a dry run, and return its line; empty if it would not be copied."""
        if isinstance(job, Problem):
            self._report.fail(job.message)
            return ""
        if is_kept:
            self._progress.num_skipped += 1
            return ""
        self._progress.finish(job.size)
        return f"{self._plan_verb} {one_line(job.source)} to {one_line(job.target)}"


def _root(argument: UriOrPath | None) -> str:
    """Return the uri of the bucket; empty for local disk, `-` for a standard stream."""
    if argument is None:
        return "-"
    return "" if argument.is_local else argument.split()[0]
