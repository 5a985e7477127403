"""Paths of Lightning as uris, and the names of its checkpoints. Pure."""

from __future__ import annotations

import os
import re
from typing import Final

from aioflux._values.uri import SCHEMES, local_uri, parse_uri

__all__ = ["ALIAS", "is_below", "is_same", "name_pattern", "to_uri"]

ALIAS: Final = "aio"
"""Prefix of the protocols that are registered with fsspec: `aiogs://bucket/key`."""

_FSSPEC_URI: Final = re.compile(rf"aio(?:flux\+)?((?:{'|'.join(SCHEMES)})://)")

_BROKEN_URI = re.compile(rf"^(?:{'|'.join([*SCHEMES, 'gcs'])}):/(?!/)", re.IGNORECASE)


def to_uri(path: str | os.PathLike[str]) -> str:
    """Return the uri of a path of Lightning: a uri, or a local path, relative or absolute.

    Raises:
        ValueError: It was a uri before `pathlib.Path` removed a slash.
    """
    text = os.fspath(path)
    if "://" in text:
        found = _FSSPEC_URI.match(text)
        return text[found.start(1) :] if found else text
    if _BROKEN_URI.match(text):
        raise ValueError(
            f"{text!r} was a uri before pathlib removed a slash; pass uris as strings. "
            "Lightning's own FSDPStrategy and ModelParallelStrategy do this to every path: use "
            "those of aioflux.integrations.lightning"
        )
    return local_uri(text)


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two paths are the same checkpoint."""
    return _normal(one) == _normal(other)


def is_below(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is below a directory or prefix, at any depth."""
    return _normal(path).startswith(f"{_normal(directory)}/")


def name_pattern(template: str, extension: str) -> re.Pattern[str]:
    """Return a pattern for the names that `ModelCheckpoint` makes of a template.

    Args:
        template: Such as `last`, or `{epoch}-last` with metrics in braces.
        extension: Such as `.ckpt`.
    """
    literals = re.split(r"\{[^}]*\}", template)
    return re.compile(rf"{'.+'.join(map(re.escape, literals))}(-v\d+)?{re.escape(extension)}")


def _normal(path: str | os.PathLike[str]) -> str:
    uri = to_uri(path)
    if uri.partition("://")[0].lower() in {*SCHEMES, "gcs"}:
        uri = str(parse_uri(uri))
    if uri.startswith("file://"):
        uri = f"file://{os.path.realpath(uri.removeprefix('file://'))}"
    return uri.rstrip("/")
