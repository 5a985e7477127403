"""Tags and names of parts as segments of keys. Without I/O."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote

_SAFE: Final = " !#$&'()+,;=@[]^{}~"
"""Characters besides letters, digits and `-._` that every service and file system allows."""

_MAX_BYTES: Final = 200
"""File systems allow names of 255 bytes, and the key of a part adds a prefix to its name."""

_NUMBER_AT_END = re.compile(r"(\d{1,15})$")
_PART = "part-"


def quote_name(name: str) -> str:
    """Quote a tag or the name of a part as one segment of a key; `tag_of` reverses it.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` is empty or too long.
    """
    if not isinstance(name, str):
        raise TypeError(f"a tag or the name of a part must be a string, not {type(name).__name__}")
    quoted = quote(name, safe=_SAFE)
    if quoted.startswith("."):  # `.` and `..` are directories; listings may skip dot files
        quoted = f"%2E{quoted[1:]}"
    if not 1 <= len(quoted) <= _MAX_BYTES:
        raise ValueError(
            f"{name!r} is not a valid tag or name of a part: in a key it has {len(quoted)} bytes, "
            f"and 1 to {_MAX_BYTES} are allowed"
        )
    return quoted


def is_tag(segment: str) -> bool:
    """Return whether a segment of a key is a result of `quote_name`."""
    try:
        return quote_name(tag_of(segment)) == segment
    except ValueError:
        return False


def tag_of(segment: str) -> str:
    """Return the tag that `quote_name` has quoted as a segment of a key."""
    return unquote(segment)


def part_name(key: str) -> str:
    """Return the name of the part in the key of a data object."""
    return unquote(key.rpartition("/")[2].removeprefix(_PART))


def step_of(tag: str) -> int:
    """Return the number at the end of a tag, such as 500 of `global_step500`, or 0."""
    match = _NUMBER_AT_END.search(tag)
    return int(match[1]) if match else 0
