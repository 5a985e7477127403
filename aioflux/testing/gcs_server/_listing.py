"""One page of a JSON listing: a plain function over sorted names."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._pages import behind, common_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aioflux.testing.gcs_server._glob import Glob

_TRAILING = "\0"  # no name has it


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What a listing asks for."""

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    """First name that may be listed."""
    end: str = ""
    """First name that may not be listed; empty: there is no such bound."""
    glob: Glob | None = None
    """What names and common prefixes must match."""
    glob_prefix: str = ""
    """What every name that matches the glob begins with."""
    with_trailing: bool = False
    """List an object whose name is a common prefix as an item as well."""


@dataclass(kw_only=True, slots=True)
class Listed:
    """What one page holds."""

    names: Sequence[str] = ()
    prefixes: list[str] = field(default_factory=list)
    more: str = ""
    """The entry at which the page ends, where others follow."""


def list_page(names: Sequence[str], query: Query, *, size: int, after: str = "") -> Listed:
    """List names and common prefixes in order, as many of both together as the page takes.

    Args:
        names: All names, sorted.
        query: What to list.
        size: How many entries the page takes; at least one.
        after: Where the page before ended (`Listed.more`).
    """
    low, high = _bounds(names, query)
    if not query.delimiter and query.glob is None:
        low = max(low, bisect_right(names, after)) if after else low
        taken = names[low : min(high, low + size)]
        return Listed(names=taken, more=taken[-1] if low + size < high else "")
    return _collect(_walk(names, query, low, high, after), size)


def _collect(entries: Iterator[tuple[str, bool]], size: int) -> Listed:
    """Take entries until the page is full; one more shows that others follow."""
    found: list[str] = []
    prefixes: list[str] = []
    last = ""
    for entry, is_prefix in entries:
        if len(found) + len(prefixes) == size:
            return Listed(names=found, prefixes=prefixes, more=last)
        (prefixes if is_prefix else found).append(entry.removesuffix(_TRAILING))
        last = entry
    return Listed(names=found, prefixes=prefixes)


def _bounds(names: Sequence[str], query: Query) -> tuple[int, int]:
    """Return the range of the names that prefix, glob and offsets leave."""
    low, high = bisect_left(names, max(query.start, query.prefix)), len(names)
    if query.end:
        high = max(low, bisect_left(names, query.end, low))
    for prefix in (query.prefix, query.glob_prefix):
        if prefix:
            low = max(low, bisect_left(names, prefix, low, high))
            high = behind(names, prefix, low, high)
    return low, high


def _walk(
    names: Sequence[str], query: Query, low: int, high: int, after: str
) -> Iterator[tuple[str, bool]]:
    """Yield the entries behind `after` in order, each with whether it is a common prefix.

    An object with the name of a common prefix comes before it, marked with `_TRAILING`.
    """
    fits = query.glob.matches if query.glob else bool
    position = _resume(names, query, low, high, after) if after else low
    while position < high:
        name = names[position]
        common = common_prefix(name, query.prefix, query.delimiter)
        if common is None:
            position += 1
            if fits(name):
                yield name, False
            continue
        marked = common + _TRAILING
        if query.with_trailing and name == common and marked != after and fits(name):
            yield marked, False
        if fits(common):
            yield common, True
        position = behind(names, common, position, high)


def _resume(names: Sequence[str], query: Query, low: int, high: int, after: str) -> int:
    """Return the index of the first name to look at behind an entry, listed or deleted since."""
    if after.endswith(_TRAILING):
        return bisect_left(names, after.removesuffix(_TRAILING), low, high)
    if common_prefix(after, query.prefix, query.delimiter) == after:
        return behind(names, after, bisect_left(names, after, low, high), high)
    return bisect_right(names, after, low, high)
