"""What there is to copy: sources, listed, with the name of each at the target."""

from __future__ import annotations

import os
import stat
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux.cli._copy_disk import walk
from aioflux.cli._copy_plan import Clashes, Job, Problem, base_name, clash_message, local_problem
from aioflux.cli._location import uri_of
from aioflux.cli._ls import find
from aioflux.cli._text import describe, one_line
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._copy_plan import Work
    from aioflux.cli._event_loop import Threads
    from aioflux.cli._location import Place
    from aioflux.store import Store

__all__ = ["Target", "below_directory", "below_prefix", "each_file", "each_object", "refuse_inside"]

_WALK_ITEMS = 1000
_MAX_HEADS = 64


@dataclass(frozen=True, slots=True)
class Target:
    """Where copies go, and how they are named there."""

    place: Place | None
    """None for standard output."""
    is_directory: bool
    """Whether copies are named below it; otherwise it is the name of the one copy."""

    def job(self, source: str, origin: ObjectMeta | str, size: int, rest: str) -> Work:
        """Return the job of one source, whose name below the target is `rest`."""
        if self.place is None:
            return Job(source, "standard output", origin, "", size)
        place = self.place
        if not place.is_local:
            base = place.location.key
            if self.is_directory:
                base = f"{base}/" if base and not base.endswith("/") else base
                key = base + rest
            else:
                key = base
            scheme, bucket = place.location.scheme, place.location.bucket
            return Job(source, f"{scheme}://{bucket}/{key}", origin, key, size)
        path = place.path
        if self.is_directory:
            if problem := local_problem(rest):
                return Problem(f"cannot copy {one_line(source)} to local disk: {problem}")
            path = f"{path.rstrip('/')}/{rest}"
        return Job(source, path, origin, path, size)


def refuse_inside(source: Place, target: Target) -> None:
    """Refuse to copy a directory or prefix into itself, which would never end.

    Raises:
        ValueError: The target is the source, or below it.
    """
    inner, outer = _prefix(target.place), _prefix(source)
    if inner is not None and outer is not None and inner.startswith(outer):
        assert target.place is not None
        raise ValueError(f"cannot copy {source.text} into itself ({target.place.text})")


def _prefix(place: Place | None) -> str | None:
    """Return what everything below a place begins with; None for standard output."""
    if place is None:
        return None
    if place.is_local:
        return f"file:{os.path.realpath(place.path).rstrip('/')}/"
    scheme, bucket, key = place.location.scheme, place.location.bucket, place.location.key
    return f"{scheme}://{bucket}/{key}" + ("/" if key and not key.endswith("/") else "")


def _below(source: Place, target: Target) -> Callable[[str, ObjectMeta | str, int, str], Work]:
    """Return `target.job`, without jobs that would write over what is to be copied.

    Where the source is `q/ov` and the target `q`, `q/ov/ov/x` would become `q/ov/x`, which is below
    the source itself.
    """
    inner, outer = _prefix(source), _prefix(target.place)
    assert inner is not None
    own = inner[len(outer) :] if outer is not None and inner.startswith(outer) else None

    def job(name: str, origin: ObjectMeta | str, size: int, rest: str) -> Work:
        work = target.job(name, origin, size, rest)
        if own is None or isinstance(work, Problem) or not rest.startswith(own):
            return work
        return Problem(
            f"cannot copy {one_line(name)} to {one_line(work.target)}: that is below "
            f"{one_line(source.text)}, which is being copied; copy to another place first"
        )

    return job


async def below_prefix(store: Store, source: Place, target: Target) -> AsyncGenerator[Work, None]:
    """Yield a job for every object below a prefix; for the object itself where nothing is.

    Raises:
        NotFoundError: There is neither.
    """
    key = source.location.key
    prefix = key if not key or key.endswith("/") else f"{key}/"
    clashes = Clashes()
    is_local = target.place is not None and target.place.is_local
    job = _below(source, target)
    found = False
    pages = store.list_pages(prefix)
    async with aclosing(pages):
        async for page in pages:
            found = True
            for meta in page:
                rest = meta.key[len(prefix) :]
                if not (rest or meta.size):
                    continue  # what consoles put in place of the prefix itself
                work = job(meta.uri, meta, meta.size, rest)
                # What is not written stands in nobody's way.
                is_new = is_local and isinstance(work, Job)
                if is_new and (other := clashes.add(rest)):
                    work = Problem(clash_message(meta.uri, uri_of(store, prefix + other)))
                yield work
    if found:
        return
    single = await find(store, key) if key != prefix else None
    if single is None:
        uri = str(source.location)
        raise NotFoundError(f"there is no object below {uri}; check the spelling", uri=uri)
    yield target.job(single.uri, single, single.size, base_name(key))


async def below_directory(
    threads: Threads, source: Place, target: Target
) -> AsyncGenerator[Work, None]:
    """Yield a job for every file below a local directory.

    Raises:
        ValueError: There is none.
    """
    root = source.path.rstrip("/") or "/"
    job = _below(source, target)
    found = walk(root, threads.stop)
    is_empty = True
    while items := await threads.run(lambda: list(islice(found, _WALK_ITEMS))):
        is_empty = False
        for item in items:
            if isinstance(item, Problem):
                yield item
            else:
                path = f"{root.rstrip('/')}/{item[0]}"
                yield job(path, path, item[1], item[0])
    if is_empty:
        raise ValueError(f"there is no file below {one_line(source.text)}")


async def each_file(
    sources: Sequence[Place], target: Target, taken: dict[str, str]
) -> AsyncGenerator[Work, None]:
    """Yield a job for each of several local files."""
    for source in sources:
        try:
            status = os.stat(source.path)
        except OSError as exc:
            yield Problem(f"cannot read {one_line(source.text)}: {exc.strerror}")
            continue
        if stat.S_ISDIR(status.st_mode):
            yield Problem(f"{one_line(source.text)} is a directory; -r copies what is below it")
            continue
        work = target.job(source.path, source.path, status.st_size, base_name(source.path))
        yield _once(work, taken)


async def each_object(
    store: Store, sources: Sequence[Place], target: Target, taken: dict[str, str]
) -> AsyncGenerator[Work, None]:
    """Yield a job for each of several objects of one store."""

    async def look(source: Place) -> Work:
        key = source.location.key
        whole = f"{one_line(source.text)} is a bucket or prefix; -r copies what is below it"
        if not source.may_be_object():
            return Problem(whole)
        try:
            meta = await store.head(key)
        except NotFoundError as exc:
            return Problem(whole if source.is_directory() else describe(exc))
        except StorageError as exc:
            return Problem(describe(exc))
        if key.endswith("/") and not meta.size:
            return Problem(whole)  # what consoles put in place of a prefix
        return target.job(meta.uri, meta, meta.size, base_name(key))

    works = bounded_map(look, sources, max_in_flight=_MAX_HEADS)
    async with aclosing(works):
        async for work in works:
            yield _once(work, taken)


def _once(work: Work, taken: dict[str, str]) -> Work:
    """Refuse a target that an earlier source takes, or that is the source itself."""
    if isinstance(work, Problem) or not work.goal:
        return work
    between_files = isinstance(work.origin, str) and work.goal == work.target
    if work.source == work.target or (between_files and _is_same_file(work.source, work.goal)):
        return Problem(f"{one_line(work.source)} and {one_line(work.target)} are the same")
    other = taken.setdefault(work.target, work.source)
    if other != work.source:
        return Problem(
            f"cannot copy {one_line(work.source)} to {one_line(work.target)}: {one_line(other)} "
            "has the same name there; copy one of the two elsewhere"
        )
    return work


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
