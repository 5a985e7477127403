"""Tags, names of parts and places, as they become keys and uris: pure."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import quote, unquote

from aioflux._uri import parse_uri, quote_path

__all__ = ["name_of", "part_name", "place_of", "quote_name", "step_of", "tag_of", "to_uri"]

_SAFE = " !#$&'()+,;=@[]^{}~"
"""Beside letters, digits and `-._`: what every service and every disk has in names."""

_MAX_BYTES = 200
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


def place_of(path: Any) -> str:
    """Return the one path that was given; nothing for None.

    The example that Nebula is taught by has a comma behind the path, which makes it a tuple.

    Raises:
        TypeError: It is no path.
    """
    if isinstance(path, tuple | list) and len(path) == 1:
        (path,) = path
    if path is None:
        return ""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a storage path is a uri or a path of the local disk, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a storage path is text, not {text!r}")
    return text


def to_uri(path: str) -> str:
    """Return the uri of a place: itself, or that of a directory of the local disk."""
    if "://" in path:
        return str(parse_uri(path)).rstrip("/")
    return f"file://{quote_path(os.path.abspath(os.path.expanduser(path)))}"


def name_of(uri: str) -> str:
    """Return what `open` and `torch.load` take for an object: a path where it is on the disk."""
    location = parse_uri(uri)
    return location.key if location.scheme == "file" else uri
