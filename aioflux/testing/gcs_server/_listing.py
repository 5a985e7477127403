"""Pages of a listing: entries, sizes and tokens.

The entries of a page are a plain function over sorted names. A token is the name where the page
before ended, not a position, so that it stays valid if names are added or deleted in between.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import integer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aioflux.testing.gcs_server._glob import Glob

_TRAILING = "\0"  # no name has it


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Names that a listing selects."""

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    """First name that may be listed."""
    end: str = ""
    """First name that may not be listed; empty: there is no such bound."""
    glob: Glob | None = None
    """Pattern that names and common prefixes must match."""
    glob_prefix: str = ""
    """Beginning of every name that matches the glob."""
    with_trailing: bool = False
    """List an object whose name is a common prefix as an item as well."""


@dataclass(kw_only=True, slots=True)
class Page:
    """Entries of one page."""

    names: Sequence[str] = ()
    prefixes: list[str] = field(default_factory=list)
    last: str = ""
    """The entry at which the page ends, if others follow."""

    def __len__(self) -> int:
        return len(self.names) + len(self.prefixes)


def list_page(names: Sequence[str], query: Query, *, size: int, after: str = "") -> Page:
    """List names and common prefixes in order, as many of both together as a page has.

    Args:
        names: All names, sorted.
        query: Names to list.
        size: Entries of the page. A page of 0 is empty and the last.
        after: Entry at which the page before ended (`Page.last`).
    """
    low, high = _bounds(names, query)
    if not query.delimiter and query.glob is None:
        low = max(low, bisect_right(names, after)) if after else low
        listed = names[low : min(high, low + size)]
        return Page(names=listed, last=listed[-1] if listed and low + size < high else "")
    return _collect(_walk(names, query, low, high, after), size)


def common_prefix(name: str, prefix: str, delimiter: str) -> str | None:
    """Return the common prefix under which a name is listed, or None if it is listed itself."""
    if not delimiter or not name.startswith(prefix):
        return None
    cut = name.find(delimiter, len(prefix))
    return None if cut < 0 else name[: cut + len(delimiter)]


def position_after(
    names: Sequence[str], query: Query, after: str, low: int = 0, high: int | None = None
) -> int:
    """Return the index of the first name behind an entry, listed or deleted since."""
    if query.with_trailing and after.endswith(_TRAILING):
        return bisect_left(names, after.removesuffix(_TRAILING), low, high)
    if common_prefix(after, query.prefix, query.delimiter) == after:
        return _end_of_prefix(names, after, bisect_left(names, after, low, high), high)
    return bisect_right(names, after, low, high)


def encode_token(name: str) -> str:
    """Return the page token for the last name of a page."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_token(token: str) -> str:
    """Return the name in a token; a 400 if no page ended in this token."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"Invalid Value: pageToken {token}") from None


def page_size(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Return how many entries a page of the JSON API may have."""
    size = integer(query, "maxResults")
    if size is not None and size < 0:
        raise APIError(400, "invalidParameter", f"Invalid value for maxResults: {size}")
    return min(size or default, most)


def _collect(entries: Iterator[tuple[str, bool]], size: int) -> Page:
    """Collect entries until the page is full; one more shows that others follow."""
    names: list[str] = []
    page, last = Page(names=names), ""
    for entry, is_prefix in entries:
        if len(page) == size:
            page.last = last
            break
        (page.prefixes if is_prefix else names).append(entry.removesuffix(_TRAILING))
        last = entry
    return page


def _bounds(names: Sequence[str], query: Query) -> tuple[int, int]:
    """Return the range of names that prefix, glob and offsets allow."""
    low, high = bisect_left(names, max(query.start, query.prefix)), len(names)
    if query.end:
        high = max(low, bisect_left(names, query.end, low))
    for prefix in (query.prefix, query.glob_prefix):
        if prefix:
            low = max(low, bisect_left(names, prefix, low, high))
            high = _end_of_prefix(names, prefix, low, high)
    return low, high


def _walk(
    names: Sequence[str], query: Query, low: int, high: int, after: str
) -> Iterator[tuple[str, bool]]:
    """Yield the entries behind `after` in order, each with whether it is a common prefix.

    An object with the name of a common prefix comes before it, marked with `_TRAILING`.
    """
    fits = query.glob.matches if query.glob else bool
    position = position_after(names, query, after, low, high) if after else low
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
        position = _end_of_prefix(names, common, position, high)


def _end_of_prefix(names: Sequence[str], prefix: str, position: int, stop: int | None) -> int:
    """Return the index behind the run of names from `position` on that begin with a prefix."""
    return bisect_left(names, True, position, stop, key=lambda name: not name.startswith(prefix))
