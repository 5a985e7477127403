"""One page of a listing: a plain function over sorted names."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(kw_only=True, slots=True)
class Page:
    """What one response of a listing holds."""

    indices: list[int] = field(default_factory=list)
    """Where in the names those stand that are listed by themselves."""
    prefixes: list[str] = field(default_factory=list)
    """What groups of names have in common, up to the delimiter; one entry per group."""
    last: str = ""
    """The name or common prefix that comes last in order."""
    is_truncated: bool = False
    """More would follow."""

    def __len__(self) -> int:
        return len(self.indices) + len(self.prefixes)


def page(
    names: Sequence[str], *, prefix: str = "", delimiter: str = "", start: int = 0, size: int
) -> Page:
    """List names and common prefixes in order.

    Args:
        names: All names, sorted.
        prefix: What each listed name begins with.
        delimiter: Names that have it behind the prefix are grouped up to its first place.
        start: Index of the first name to look at: `after` of the page before.
        size: How many names and common prefixes to list at most.
    """
    result = Page()
    position = max(start, bisect_left(names, prefix))
    while position < len(names) and names[position].startswith(prefix):
        if len(result) >= size:
            result.is_truncated = size > 0
            break
        name = names[position]
        common = common_prefix(name, prefix, delimiter)
        if common is None:
            result.indices.append(position)
            result.last = name
            position += 1
        else:
            result.prefixes.append(common)
            result.last = common
            position = behind(names, common, position)
    return result


def after(names: Sequence[str], marker: str, *, prefix: str = "", delimiter: str = "") -> int:
    """Return the index of the first name behind a marker, which is a name or a common prefix."""
    position = bisect_right(names, marker) if marker else 0
    if common_prefix(marker, prefix, delimiter) == marker:
        return behind(names, marker, position)
    return position


def common_prefix(name: str, prefix: str, delimiter: str) -> str | None:
    """Return the group that a name belongs to, or None where it stands by itself."""
    if not delimiter or not name.startswith(prefix):
        return None
    cut = name.find(delimiter, len(prefix))
    return None if cut < 0 else name[: cut + len(delimiter)]


def behind(names: Sequence[str], common: str, position: int, stop: int | None = None) -> int:
    """Return the index behind the run of names, begun at `position`, that share a prefix."""
    return bisect_left(names, True, position, stop, key=lambda name: not name.startswith(common))
