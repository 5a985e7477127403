"""Pages of a listing, computed from the sorted names, and their page tokens.

A page token encodes the last entry of the page, so that it stays valid when names are added or
deleted before the next page is requested.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import read_integer

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._glob import Glob

_TRAILING = "\0"  # suffix of an entry that is an object with the name of a common prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Names that a listing selects."""

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    """Names smaller than `start` are not listed."""
    end: str = ""
    """Only names smaller than `end` are listed. Empty means no limit."""
    glob: Glob | None = None
    """Pattern that names and common prefixes must match."""
    glob_prefix: str = ""
    """Literal prefix of `glob`."""
    with_trailing: bool = False
    """Whether an object whose name equals a common prefix is listed in addition to the prefix."""


@dataclass(kw_only=True, slots=True)
class Page:
    """Names and common prefixes on one page."""

    names: Sequence[str] = ()
    prefixes: list[str] = field(default_factory=list)
    last: str = ""
    """Last entry of the page; empty if no page follows."""

    def __len__(self) -> int:
        return len(self.names) + len(self.prefixes)


def list_page(names: Sequence[str], query: Query, *, size: int, after: str = "") -> Page:
    """Return one page of a listing.

    Args:
        names: All names, sorted.
        query: Names that the listing selects.
        size: Maximum number of names and common prefixes. With 0 no page follows.
        after: Last entry of the previous page (`Page.last`).
    """
    low, high = _select_range(names, query)
    if not query.delimiter and query.glob is None:
        low = max(low, bisect_right(names, after)) if after else low
        listed = names[low : min(high, low + size)]
        return Page(names=listed, last=listed[-1] if listed and low + size < high else "")
    return _collect(_entries_after(names, query, low, high, after), size)


def common_prefix(name: str, prefix: str, delimiter: str) -> str | None:
    """Return the common prefix that a listing has in place of a name, or None."""
    if not delimiter or not name.startswith(prefix):
        return None
    index = name.find(delimiter, len(prefix))
    return None if index < 0 else name[: index + len(delimiter)]


def position_after(
    names: Sequence[str], query: Query, after: str, low: int = 0, high: int | None = None
) -> int:
    """Return the index of the first name after an entry, which may no longer exist."""
    if query.with_trailing and after.endswith(_TRAILING):
        return bisect_left(names, after.removesuffix(_TRAILING), low, high)
    if common_prefix(after, query.prefix, query.delimiter) == after:
        return _end_of_prefix(names, after, bisect_left(names, after, low, high), high)
    return bisect_right(names, after, low, high)


def encode_token(name: str) -> str:
    """Return the page token for the last entry of a page."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_token(token: str) -> str:
    """Return the entry in a page token. Raise APIError (400) if the token is malformed."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"Invalid Value: pageToken {token}") from None


def page_size(query: Mapping[str, str], *, default: int, maximum: int) -> int:
    """Return the page size in a query of the JSON API."""
    size = read_integer(query, "maxResults")
    if size is not None and size < 0:
        raise APIError(400, "invalidParameter", f"Invalid value for maxResults: {size}")
    return min(size or default, maximum)


def _collect(entries: Iterator[tuple[str, bool]], size: int) -> Page:
    """Collect the entries of one page. An additional entry shows that another page follows."""
    names: list[str] = []
    page, last = Page(names=names), ""
    for entry, is_prefix in entries:
        if len(page) == size:
            page.last = last
            break
        (page.prefixes if is_prefix else names).append(entry.removesuffix(_TRAILING))
        last = entry
    return page


def _select_range(names: Sequence[str], query: Query) -> tuple[int, int]:
    """Return the range of indices of names that prefix, glob and offsets select."""
    low, high = bisect_left(names, max(query.start, query.prefix)), len(names)
    if query.end:
        high = max(low, bisect_left(names, query.end, low))
    for prefix in (query.prefix, query.glob_prefix):
        if prefix:
            low = max(low, bisect_left(names, prefix, low, high))
            high = _end_of_prefix(names, prefix, low, high)
    return low, high


def _entries_after(
    names: Sequence[str], query: Query, low: int, high: int, after: str
) -> Iterator[tuple[str, bool]]:
    """Yield the entries after `after` in order, each with True if it is a common prefix.

    An object with the name of a common prefix is yielded before the prefix, with `_TRAILING`.
    """
    matches = query.glob.matches if query.glob else bool
    position = position_after(names, query, after, low, high) if after else low
    while position < high:
        name = names[position]
        common = common_prefix(name, query.prefix, query.delimiter)
        if common is None:
            position += 1
            if matches(name):
                yield name, False
            continue
        trailing = common + _TRAILING
        if query.with_trailing and name == common and trailing != after and matches(name):
            yield trailing, False
        if matches(common):
            yield common, True
        position = _end_of_prefix(names, common, position, high)


def _end_of_prefix(names: Sequence[str], prefix: str, position: int, stop: int | None) -> int:
    """Return the index after the names from `position` on that begin with a prefix."""
    return bisect_left(names, True, position, stop, key=lambda name: not name.startswith(prefix))
