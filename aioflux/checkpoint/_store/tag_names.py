"""Tags and names of parts in keys. Pure."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote

__all__ = ["is_tag", "part_name", "quote_name", "step_of", "tag_of"]

_SAFE: Final = " !#$&'()+,;=@[]^{}~"
"""Characters that every service and every disk allows in names, besides letters, digits, `-._`."""

_MAX_BYTES: Final = 200
"""Disks allow names of 255 bytes, and keys add a prefix to the name."""

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
    if quoted.startswith("."):  # `.` and `..` are directories, and dot files are not always listed
        quoted = f"%2E{quoted[1:]}"
    if not 1 <= len(quoted) <= _MAX_BYTES:
        raise ValueError(
            f"{name!r} is no tag and no name of a part: in a key it has {len(quoted)} bytes, not 1 "
            f"to {_MAX_BYTES}"
        )
    return quoted


def is_tag(segment: str) -> bool:
    """Return whether a segment of a key is a result of `quote_name`."""
    try:
        return quote_name(tag_of(segment)) == segment
    except ValueError:
        return False


def tag_of(segment: str) -> str:
    """Return the tag of a segment of a key."""
    return unquote(segment)


def part_name(key: str) -> str:
    """Return the name of the part in the key of a data object."""
    return unquote(key.rpartition("/")[2].removeprefix(_PART))


def step_of(tag: str) -> int:
    """Return the number at the end of a tag, such as 500 of `global_step500`, or 0."""
    found = _NUMBER_AT_END.search(tag)
    return int(found[1]) if found else 0
