"""`aioflux cp`: options, and one run of the command."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Self

import typer

from aioflux._concurrency.fan_out import bounded_batches
from aioflux.cli._cp.copier import Copier
from aioflux.cli._cp.local_files import FileThreads, LocalFiles
from aioflux.cli._cp.objects import StandardStreams, StoreObjects
from aioflux.cli._cp.plan import CopyJob, Problem
from aioflux.cli._cp.sources import (
    Destination,
    list_directory,
    list_files,
    list_objects,
    list_prefix,
    reject_copy_into_itself,
)
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines, print_notice
from aioflux.cli._progress import CommandProgress
from aioflux.cli._text import one_line
from aioflux.cli._uri_or_path import Anonymous, Endpoint, parse_arguments

if TYPE_CHECKING:
    from types import TracebackType

    from aioflux.cli._cp.objects import CopySource, CopyTarget
    from aioflux.cli._cp.plan import JobOrProblem
    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.store import Store

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


def cp(
    sources: Sources = (),  # type: ignore[assignment]  # typer passes a list
    target: Target = "",
    *,
    recursive: Recursive = False,
    no_clobber: NoClobber = False,
    dry_run: DryRun = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Copy objects and files; names follow "aws s3 cp".

    TARGET is a directory if it ends in "/", is a bucket, or is an existing local directory: each
    copy keeps the last segment of its name. Otherwise TARGET is the new name. Several SOURCEs can
    be written to standard output, one after the other.

    With -r, everything below SOURCE is copied below TARGET with the same relative names, whether
    or not either ends in "/": "cp -r dir gs://b/p" creates "gs://b/p/..." from "dir/...". An empty
    object whose key ends in "/" becomes a directory; empty directories are not copied.

    For each of the following an error is printed, the other copies are made, and the exit status
    is 1: links to directories, which are not followed; files that are not regular, such as pipes;
    keys whose path would be outside a local TARGET ("..", "/...", through a link); keys that need
    a directory with the name of another file; copies that would be written below SOURCE itself.

    Existing objects and files are overwritten. Copies appear whole or not at all; a local file
    that is overwritten keeps its mode. The bytes of objects are verified with crc32c when they are
    read and when they are written. Copies within a bucket keep all metadata. Copies to another
    bucket keep content type and custom metadata, but not cache control, content disposition,
    content language and storage class.
    """
    if not (sources and target):
        # Not by typer, which takes one argument for the TARGET.
        what = "the TARGET is missing" if sources or target else "SOURCE and TARGET are missing"
        raise typer.BadParameter(f"{what}; write SOURCE... TARGET")
    origins, destination = _parse(
        sources, target, endpoint_url, anonymous=anonymous, recursive=recursive
    )

    async def work() -> int:
        async with CopyRun(destination, no_clobber=no_clobber, dry_run=dry_run) as copy:
            if recursive:
                assert origins[0] is not None
                await copy.copy_below(origins[0])
            else:
                await copy.copy_each(origins)
        return copy.finish()

    return run(work)


def _parse(
    sources: list[str],
    target: str,
    endpoint_url: str | None,
    *,
    anonymous: bool,
    recursive: bool,
) -> tuple[list[UriOrPath | None], Destination]:
    """Parse the arguments, and reject combinations without a meaning.

    The source is None for standard input.
    """
    if recursive and (len(sources) > 1 or sources == ["-"]):
        raise typer.BadParameter("-r takes one SOURCE, which is not standard input")
    if recursive and target == "-":
        raise typer.BadParameter("-r cannot write to standard output")
    if sources.count("-") > 1:
        raise typer.BadParameter("standard input can be read only once")
    named = [text for text in [*sources, target] if text != "-"]
    parsed = iter(parse_arguments(named, endpoint_url, anonymous=anonymous))
    *origins, goal = [None if text == "-" else next(parsed) for text in [*sources, target]]
    is_directory = goal is not None and (recursive or goal.is_directory())
    if len(sources) > 1 and goal is not None and not is_directory:
        raise typer.BadParameter('with several SOURCEs, TARGET must be a directory: end it in "/"')
    if None in origins and is_directory:
        raise typer.BadParameter(
            'standard input has no name: TARGET must be a file or object, without a "/" at its end'
        )
    return origins, Destination(goal, is_directory)


class CopyRun:
    """One run of the command: open stores, copies, and counts for the summary."""

    def __init__(self, target: Destination, *, no_clobber: bool, dry_run: bool) -> None:
        self._target = target
        self._no_clobber = no_clobber
        self._dry_run = dry_run
        self._progress = CommandProgress(num_listings=1)
        self._report = Report()
        self._threads = FileThreads()
        goal = target.argument
        root = goal.path if goal is not None and goal.is_local and target.is_directory else None
        self._files = LocalFiles(self._threads, no_clobber=no_clobber, root=root)
        self._stores: dict[str, Store] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        # If the data is printed on the terminal, a progress bar would be mixed with it.
        is_data_shown = self._target.argument is None and sys.stdout.isatty()
        shown = self._progress.show(is_wanted=not (self._dry_run or is_data_shown))
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
        if error is not None and self._progress.num_objects and not self._dry_run:
            print_notice(self._progress.summary("Stopped; copied at least"))

    def finish(self) -> int:
        """Print the summary, and return the exit status."""
        if self._dry_run:
            return self._report.finish(self._progress.summary("would copy", is_timed=False))
        if self._target.argument is None and not self._report.num_failed:
            return 0
        return self._report.finish(self._progress.summary("copied"))

    async def copy_below(self, source: UriOrPath) -> None:
        """Copy everything below a directory or prefix, or the one file or object of this name."""
        reject_copy_into_itself(source, self._target)
        goal = self._target.argument
        if goal is not None and goal.is_file():
            raise ValueError(f"{goal.text} is a file; -r needs a directory")
        if not source.is_local:
            store = await self._store(source)
            await self._run(StoreObjects(store), list_prefix(store, source, self._target))
        elif source.is_directory():
            await self._run(self._files, list_directory(self._threads, source, self._target))
        else:
            await self.copy_each([source])

    async def copy_each(self, sources: Sequence[UriOrPath | None]) -> None:
        """Copy single files and objects, in the given order; None is standard input."""
        used: dict[str, str] = {}
        groups = [(root, list(group)) for root, group in groupby(sources, key=_root)]
        self._progress.num_listings = len(groups)
        for root, group in groups:
            named = [source for source in group if source is not None]
            if not named:
                await self._run(StandardStreams(), self._stdin())
            elif root:
                store = await self._store(named[0])
                jobs = list_objects(store, named, self._target, used)
                await self._run(StoreObjects(store), jobs)
            else:
                await self._run(self._files, list_files(named, self._target, used))

    async def _stdin(self) -> AsyncGenerator[JobOrProblem, None]:
        yield self._target.job("standard input", "", -1, "")

    async def _store(self, argument: UriOrPath) -> Store:
        root, _ = argument.split()
        if root not in self._stores:
            self._stores[root] = await self._stack.enter_async_context(argument.open_root(root))
        return self._stores[root]

    async def _copy_target(self) -> CopyTarget:
        goal = self._target.argument
        if goal is None:
            return StandardStreams()
        if goal.is_local:
            return self._files
        return StoreObjects(await self._store(goal), no_clobber=self._no_clobber)

    async def _run(self, source: CopySource, jobs: AsyncGenerator[JobOrProblem, None]) -> None:
        if self._dry_run:
            await self._print_plan(jobs)
            return
        target = await self._copy_target()
        await Copier(source, target, self._progress, self._report).run(jobs)

    async def _print_plan(self, jobs: AsyncGenerator[JobOrProblem, None]) -> None:
        """Print a line for each object that would be copied."""
        target = await self._copy_target() if self._no_clobber else None

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
        return f"would copy {one_line(job.source)} to {one_line(job.target)}"


def _root(argument: UriOrPath | None) -> str:
    """Return the uri of the bucket; empty for local disk, `-` for a standard stream."""
    if argument is None:
        return "-"
    return "" if argument.is_local else argument.split()[0]
