"""What Lightning calls a path, and the names of its checkpoints: pure."""

from __future__ import annotations

import os
import re
from typing import Final

from aioflux._values.uri import SCHEMES, parse_uri, quote_path

__all__ = ["ALIAS", "is_below", "is_same", "name_pattern", "to_uri"]

ALIAS: Final = "aio"
"""What fsspec knows our filesystems by begins with this: `aiogs://bucket/key`."""

_FSSPEC_URI: Final = re.compile(rf"aio(?:flux\+)?((?:{'|'.join(SCHEMES)})://)")

_TAKEN_APART = re.compile(rf"^(?:{'|'.join([*SCHEMES, 'gcs'])}):/(?!/)", re.IGNORECASE)


def to_uri(path: str | os.PathLike[str]) -> str:
    """Return the uri that a path of Lightning means.

    Args:
        path: A uri, or a path of the local disk, relative or absolute.

    Raises:
        ValueError: It was a uri before `pathlib.Path` took it apart.
    """
    text = os.fspath(path)
    if "://" in text:
        found = _FSSPEC_URI.match(text)
        return text[found.start(1) :] if found else text
    if _TAKEN_APART.match(text):
        raise ValueError(
            f"{text!r} was a uri before pathlib took a slash out of it; pass uris as strings. "
            "Lightning's own FSDPStrategy and ModelParallelStrategy do this to every path: use "
            "those of aioflux.integrations.lightning"
        )
    return f"file://{quote_path(os.path.abspath(text))}"


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Tell whether two paths mean one checkpoint."""
    return _normal(one) == _normal(other)


def is_below(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
    """Tell whether a checkpoint is somewhere below a directory or prefix."""
    return _normal(path).startswith(f"{_normal(directory)}/")


def name_pattern(template: str, extension: str) -> re.Pattern[str]:
    """Return what matches the names that `ModelCheckpoint` makes of a template.

    Args:
        template: Such as `last`, or `{epoch}-last` with metrics in braces.
        extension: Such as `.ckpt`.
    """
    words = re.split(r"\{[^}]*\}", template)
    return re.compile(rf"{'.+'.join(map(re.escape, words))}(-v\d+)?{re.escape(extension)}")


def _normal(path: str | os.PathLike[str]) -> str:
    uri = to_uri(path)
    if uri.partition("://")[0].lower() in {*SCHEMES, "gcs"}:
        uri = str(parse_uri(uri))
    if uri.startswith("file://"):
        uri = f"file://{os.path.realpath(uri.removeprefix('file://'))}"
    return uri.rstrip("/")
