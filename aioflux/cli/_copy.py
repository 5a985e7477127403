"""One run of `aioflux cp`: what it opens, shows and leaves."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack, aclosing
from itertools import groupby
from typing import TYPE_CHECKING, Self

from aioflux._concurrency.fan_out import bounded_batches
from aioflux.cli._copy_disk import Disk
from aioflux.cli._copy_plan import Job, Problem
from aioflux.cli._copy_run import Copier, Tally
from aioflux.cli._copy_sources import (
    below_directory,
    below_prefix,
    each_file,
    each_object,
    refuse_inside,
)
from aioflux.cli._copy_store import Standard, Stored
from aioflux.cli._event_loop import Threads
from aioflux.cli._location import open_place
from aioflux.cli._stdout import tell
from aioflux.cli._text import complain, one_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from aioflux.cli._copy_plan import Work
    from aioflux.cli._copy_sources import Target
    from aioflux.cli._copy_store import Goal, Origin
    from aioflux.cli._location import Access, Place
    from aioflux.store import Store

__all__ = ["Copy"]

_MAX_LOOKS = 64


class Copy:
    """One run of the command: the stores it opens, its progress and what is left at the end."""

    def __init__(self, target: Target, access: Access, *, no_clobber: bool, dry_run: bool) -> None:
        self._target = target
        self._access = access
        self._no_clobber = no_clobber
        self._dry_run = dry_run
        self._tally = Tally(num_listings=1)
        self._threads = Threads()
        place = target.place
        root = place.path if place is not None and place.is_local and target.is_directory else None
        self._disk = Disk(self._threads, no_clobber=no_clobber, root=root)
        self._stores: dict[str, Store] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if not self._dry_run and _is_terminal(self._target):
            from aioflux.cli._progress import show_progress

            self._stack.enter_context(show_progress(self._tally))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)
        self._disk.tidy()
        if error is not None and self._tally.num_objects and not self._dry_run:
            complain(self._tally.summary("stopped; copied at least"))

    def finish(self) -> int:
        """Say what was done, and return the exit status."""
        if self._dry_run:
            return self._tally.report.finish(self._tally.plan_summary())
        if self._target.place is None and not self._tally.report.num_failed:
            return 0
        return self._tally.report.finish(self._tally.summary("copied"))

    async def below(self, source: Place) -> None:
        """Copy what is below a directory or prefix; a single file or object where it is one."""
        refuse_inside(source, self._target)
        place = self._target.place
        if place is not None and place.is_file():
            raise ValueError(f"{place.text} is a file; -r needs a directory")
        if not source.is_local:
            store = await self._store(_root(source))
            await self._run(Stored(store), below_prefix(store, source, self._target))
        elif source.is_directory():
            await self._run(self._disk, below_directory(self._threads, source, self._target))
        else:
            await self.each([source])

    async def each(self, sources: Sequence[Place | None]) -> None:
        """Copy single files and objects, and standard input for None, in the order given."""
        taken: dict[str, str] = {}
        groups = [(root, list(group)) for root, group in groupby(sources, key=_root)]
        self._tally.num_listings = len(groups)
        for root, group in groups:
            several = [place for place in group if place is not None]
            if not several:
                await self._run(Standard(), self._stdin())
            elif root:
                store = await self._store(root)
                works = each_object(store, several, self._target, taken)
                await self._run(Stored(store), works)
            else:
                await self._run(self._disk, each_file(several, self._target, taken))

    async def _stdin(self) -> AsyncGenerator[Work, None]:
        yield self._target.job("standard input", "", -1, "")

    async def _store(self, root: str) -> Store:
        if root not in self._stores:
            store = open_place(root, self._access)
            self._stores[root] = await self._stack.enter_async_context(store)
        return self._stores[root]

    async def _goal(self) -> Goal:
        place = self._target.place
        if place is None:
            return Standard()
        if place.is_local:
            return self._disk
        return Stored(await self._store(_root(place)), no_clobber=self._no_clobber)

    async def _run(self, origin: Origin, works: AsyncGenerator[Work, None]) -> None:
        if not self._dry_run:
            await Copier(origin, await self._goal(), self._tally).run(works)
            return
        goal = await self._goal() if self._no_clobber else None

        async def look(work: Work) -> tuple[Work, bool]:
            is_kept = goal is not None and isinstance(work, Job) and await goal.keeps(work)
            return work, is_kept

        async with aclosing(works):
            looked = bounded_batches(look, works, max_in_flight=_MAX_LOOKS)
            async with aclosing(looked):
                async for batch in looked:
                    await tell("\n".join(filter(None, (self._foresee(*each) for each in batch))))

    def _foresee(self, work: Work, is_kept: bool) -> str:
        """Count what would become of one object; return the line that says it is copied."""
        if isinstance(work, Problem):
            self._tally.report.fail(work.message)
            return ""
        if is_kept:
            self._tally.num_skipped += 1
            return ""
        self._tally.num_objects += 1
        self._tally.num_bytes += max(work.size, 0)
        return f"would copy {one_line(work.source)} to {one_line(work.target)}"


def _root(place: Place | None) -> str:
    """Return the uri of the bucket; nothing for local disk, `-` for a standard stream."""
    if place is None:
        return "-"
    return "" if place.is_local else place.split()[0]


def _is_terminal(target: Target) -> bool:
    """Tell whether progress can be shown: not over the very data, which a terminal shows too."""
    if target.place is None and sys.stdout.isatty():
        return False
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
