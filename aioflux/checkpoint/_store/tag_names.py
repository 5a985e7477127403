"""Tags and names of parts, as they become keys: pure."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote

__all__ = ["is_tag", "part_name", "quote_name", "step_of", "tag_of"]

_SAFE: Final = " !#$&'()+,;=@[]^{}~"
"""Beside letters, digits and `-._`: what every service and every disk has in names."""

_MAX_BYTES: Final = 200
"""A disk takes names of 255 bytes, and ours come with a word before them."""

_NUMBER_AT_END = re.compile(r"(\d{1,15})$")
_PART = "part-"


def quote_name(name: str) -> str:
    """Return a tag or the name of a part as one segment of a key; `tag_of` undoes it.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, or too long.
    """
    if not isinstance(name, str):
        raise TypeError(f"a tag and the name of a part are strings, not {type(name).__name__}")
    quoted = quote(name, safe=_SAFE)
    if quoted.startswith("."):  # what begins with a dot is not listed everywhere, or means a place
        quoted = f"%2E{quoted[1:]}"
    if not 1 <= len(quoted) <= _MAX_BYTES:
        raise ValueError(
            f"{name!r} is no tag and no name of a part: written into a key it has {len(quoted)} "
            f"bytes, not 1 to {_MAX_BYTES}"
        )
    return quoted


def is_tag(segment: str) -> bool:
    """Tell whether a segment of a key is one that `quote_name` returned, and nobody else's."""
    try:
        return quote_name(tag_of(segment)) == segment
    except ValueError:
        return False


def tag_of(segment: str) -> str:
    """Return what `quote_name` was given."""
    return unquote(segment)


def part_name(key: str) -> str:
    """Return the name of the part that a data object holds, by its key."""
    return unquote(key.rpartition("/")[2].removeprefix(_PART))


def step_of(tag: str) -> int:
    """Return the number that a tag ends with, such as 500 of `global_step500`; 0 without one."""
    found = _NUMBER_AT_END.search(tag)
    return int(found[1]) if found else 0
