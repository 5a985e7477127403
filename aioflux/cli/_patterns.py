"""Patterns in arguments and in `--include` and `--exclude`, and commands that take each argument.

    gs://bucket/a/*.txt -> literal name? -> listing below gs://bucket/a/ -> one argument per match

The syntax is that of `match_glob` of `Store.list`. A name that exists literally is taken before
what it matches as a pattern, so that no other object is read or deleted by mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux._local_files import is_temporary
from aioflux._values.glob import compile_glob, literal_prefix
from aioflux._values.uri import Location
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report
from aioflux.cli._text import one_line
from aioflux.cli._uri_or_path import PATTERN, UriOrPath, as_prefix, find, parse_arguments
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Only names that match, or are in a directory that does; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="No names that match, or are in a directory that does; repeatable."
    ),
]


@dataclass(frozen=True, slots=True)
class NameFilter:
    """The names, relative to the argument, that `--include` and `--exclude` admit."""

    included: tuple[re.Pattern[str], ...] = ()
    """Patterns of which one must match; none for all names."""
    excluded: tuple[re.Pattern[str], ...] = ()
    """Patterns of which none may match."""

    @classmethod
    def parse(cls, include: Sequence[str] | None, exclude: Sequence[str] | None) -> NameFilter:
        """Return the filter of two options.

        Raises:
            ValueError: A pattern is malformed.
        """
        return cls(
            tuple(map(_compile_filter, include or ())), tuple(map(_compile_filter, exclude or ()))
        )

    def admits(self, name: str) -> bool:
        """Return whether a name passes the filter."""
        if self.excludes(name):
            return False
        return not self.included or any(pattern.fullmatch(name) for pattern in self.included)

    def excludes(self, name: str) -> bool:
        """Return whether `--exclude` names an object or file, or a directory that it is in."""
        return any(pattern.fullmatch(name) for pattern in self.excluded)


def _compile_filter(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for a name, or for a directory above it.

    Without a `/` it is for the last segment of the name or the directory.
    """
    regex = compile_glob(pattern.strip("/")).pattern
    start = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
    return re.compile(f"{start}(?:{regex})(?:/.*)?", re.DOTALL)


def run_for_each(
    texts: Iterable[str],
    act: Callable[[UriOrPath], Awaitable[None]],
    *,
    prefixes: bool = False,
    finish: Callable[[Report], Awaitable[int]] | None = None,
) -> int:
    """Run `act` with each argument, and with each match of a pattern; return the exit status.

    If it fails for an argument, an error is printed, and the next one follows.

    Args:
        texts: The arguments.
        act: The command for one argument.
        prefixes: Whether patterns match prefixes, too.
        finish: Prints what follows the last argument, and returns the exit status.
    """
    arguments = parse_arguments(texts)

    async def work() -> int:
        report = Report()
        for argument in arguments:
            async with report.printing(), aclosing(expand(argument, prefixes=prefixes)) as found:
                async for each in found:
                    async with report.printing():
                        await act(each)
        return await finish(report) if finish else report.finish()

    return run(work)


async def expand(argument: UriOrPath, *, prefixes: bool = False) -> AsyncGenerator[UriOrPath, None]:
    """Yield what a pattern matches, by name; an argument without a pattern as it is.

    Args:
        argument: The argument.
        prefixes: Whether prefixes match, too; their names end in `/`.

    Raises:
        NotFoundError: Nothing matches.
        ValueError: The pattern is malformed, or the bucket has one.
    """
    text = argument.path if argument.is_local else argument.location.key
    if not PATTERN.search(text):
        yield argument
        return
    alternatives = _alternatives(text)
    if len(alternatives) > 1 and await _exists(argument):
        alternatives = [text]
    is_found, seen = False, set[str]()
    for pattern in alternatives:
        find_matches = _local_matches if argument.is_local else partial(_matches, prefixes=prefixes)
        async with aclosing(find_matches(argument, pattern)) as found:
            async for each in found:
                if each.text not in seen:
                    if len(alternatives) > 1:
                        seen.add(each.text)
                    is_found = True
                    yield each
    if not is_found:
        listed = one_line(str(argument.location)[: -len(text)] + _literal_directory(text))
        where = listed if "://" in argument.text else _literal_directory(text) or "."
        raise NotFoundError(
            f"nothing matches {one_line(argument.text)}; list the names with aioflux ls "
            f"{one_line(where)}",
            uri=str(argument.location),
        )


def _literal_directory(pattern: str) -> str:
    literal = PATTERN.split(pattern, maxsplit=1)[0]
    return literal[: literal.rfind("/") + 1]


def _alternatives(pattern: str) -> list[str]:
    """Return a pattern for each text in braces in which a `/` is: levels are matched one by one."""
    found = re.search(r"\{([^{}]*/[^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [
        each for text in found[1].split(",") for each in _alternatives(f"{before}{text}{after}")
    ]


async def _exists(argument: UriOrPath) -> bool:
    """Return whether a file or an object has literally this name."""
    if argument.is_local:
        return os.path.lexists(argument.path)  # noqa: ASYNC240  one call
    store, key = argument.open()
    return await find(store, key) is not None


async def _local_matches(argument: UriOrPath, pattern: str) -> AsyncGenerator[UriOrPath, None]:
    is_name = os.path.lexists(pattern)  # noqa: ASYNC240  one call
    for name in [pattern] if is_name else _find_paths(pattern):
        location = Location("file", "", os.path.join(os.getcwd(), name))
        yield UriOrPath(str(location) if "://" in argument.text else name, location)


def _find_paths(pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches; with `**` only those of files."""
    base = _literal_directory(pattern)
    rest = pattern[len(base) :]
    if "**" not in rest:
        yield from _find_levels(base, rest.split("/"))
        return
    admits = compile_glob(rest).fullmatch
    for directory, names, files in os.walk(base or "."):
        names.sort()
        above = f"{directory.rstrip('/')}/" if base else f"{directory}/"[2:]
        for name in sorted(files):
            if admits((above + name)[len(base) :]) and not is_temporary(name):
                yield above + name


def _find_levels(base: str, segments: Sequence[str]) -> Iterator[str]:
    """Yield the paths below a directory whose segments match patterns, level by level."""
    pattern, *rest = segments
    admits = compile_glob(pattern).fullmatch
    try:
        names = sorted(os.listdir(base or "."))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = f"{base}{name}"
        if not admits(name) or is_temporary(name):
            continue
        if not rest:
            yield path
        elif rest == [""]:
            yield from [f"{path}/"] if os.path.isdir(path) else []
        else:
            yield from _find_levels(f"{path}/", rest)


async def _matches(
    argument: UriOrPath, pattern: str, *, prefixes: bool
) -> AsyncGenerator[UriOrPath, None]:
    """Yield the objects, and perhaps prefixes, of a bucket that a pattern matches."""
    store, _ = argument.open()

    def match(key: str, meta: ObjectMeta | None) -> UriOrPath:
        location = replace(argument.location, key=key)
        return UriOrPath(str(location), location, meta)

    if (meta := await find(store, pattern)) is not None:
        yield match(pattern, meta)
    elif prefixes and await store.list_all(as_prefix(pattern), limit=1):
        yield match(pattern, None)
    elif prefixes and "**" not in pattern:
        base = _literal_directory(pattern)
        levels = _list_levels(store, base, pattern[len(base) :].split("/"))
        async with aclosing(levels):
            async for key, meta in levels:
                yield match(key, meta)
    else:
        base = _literal_directory(pattern)
        is_level = "/" not in pattern[len(base) :] and "**" not in pattern
        admits = compile_glob(pattern).fullmatch
        # One level is listed without those below; for several, the service filters if it can.
        pages = store.list_pages(
            literal_prefix(pattern),
            delimiter="/" if is_level else "",
            match_glob="" if is_level else pattern,
        )
        async with aclosing(pages):
            async for page in pages:
                for each in page:
                    if admits(each.key):
                        yield match(each.key, each)


async def _list_levels(
    store: Store, base: str, segments: Sequence[str]
) -> AsyncGenerator[tuple[str, ObjectMeta | None], None]:
    """Yield objects and prefixes below `base` whose segments match patterns, level by level."""
    pattern, *rest = segments
    admits = compile_glob(pattern).fullmatch
    listing = await store.list_all(base + literal_prefix(pattern), delimiter="/")
    found: list[tuple[str, ObjectMeta | None]] = [
        (meta.key, meta) for meta in listing if not rest and admits(meta.key[len(base) :])
    ]
    found += ((key, None) for key in listing.prefixes if admits(key[len(base) : -1]))
    for key, meta in sorted(found, key=itemgetter(0)):
        if not rest or rest == [""]:
            yield key, meta
            continue
        inner = _list_levels(store, key, rest)
        async with aclosing(inner):
            async for each in inner:
                yield each
