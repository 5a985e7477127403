"""Places of Nebula, as paths and as uris: pure."""

from __future__ import annotations

import os
from typing import Any

from aioflux._values.uri import parse_uri, quote_path

__all__ = ["name_of", "place_of", "scheme_of", "to_uri"]


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


def scheme_of(path: str) -> str:
    """Return the scheme of the uri of a place."""
    return parse_uri(to_uri(path)).scheme if path else ""


def name_of(uri: str) -> str:
    """Return what `open` and `torch.load` take for an object: a path where it is on the disk."""
    location = parse_uri(uri)
    return location.key if location.scheme == "file" else uri
