"""Conversion of Lightning's paths to uris, and patterns for names of checkpoints. Pure."""

from __future__ import annotations

import os
import re
from typing import Final

from aioflux._values.uri import SCHEMES, local_uri, parse_uri

FOUND: Final = "aiolightning+"
"""Prefix of the paths of checkpoints that `ckpt_path="last"` has found."""

_FSSPEC_URI: Final = re.compile(rf"aio(?:lightning\+)?((?:{'|'.join(SCHEMES)})://)")

_URI_WITHOUT_SLASH = re.compile(rf"^(?:{'|'.join([*SCHEMES, 'gcs'])}):/(?!/)", re.IGNORECASE)


def to_uri(path: str | os.PathLike[str]) -> str:
    """Convert a path of Lightning, which is a uri or a relative or absolute local path, to a uri.

    Raises:
        ValueError: `path` is a uri of which `pathlib.Path` has removed a slash.
    """
    text = os.fspath(path)
    if "://" in text:
        match = _FSSPEC_URI.match(text)
        return text[match.start(1) :] if match else text
    if _URI_WITHOUT_SLASH.match(text):
        raise ValueError(
            f"pathlib removed a slash of the uri {text!r}; pass uris as strings. Lightning's "
            "FSDPStrategy and ModelParallelStrategy convert every path by pathlib: use the "
            "strategies of aioflux.integrations.lightning"
        )
    return local_uri(text)


def is_same(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Return whether two paths name the same checkpoint."""
    return _normalize(first) == _normalize(second)


def is_below(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is below a directory or prefix, at any depth."""
    return _normalize(path).startswith(f"{_normalize(directory)}/")


def name_pattern(template: str, extension: str) -> re.Pattern[str]:
    """Return a pattern for names that `ModelCheckpoint` formats by a template.

    The template is for example `last`, or `{epoch}-last`: braces contain the name of a metric. The
    extension begins with a dot.
    """
    literals = re.split(r"\{[^}]*\}", template)
    return re.compile(rf"{'.+'.join(map(re.escape, literals))}(-v\d+)?{re.escape(extension)}")


def _normalize(path: str | os.PathLike[str]) -> str:
    uri = to_uri(path)
    if uri.partition("://")[0].lower() in {*SCHEMES, "gcs"}:
        uri = str(parse_uri(uri))
    if uri.startswith("file://"):
        uri = f"file://{os.path.realpath(uri.removeprefix('file://'))}"
    return uri.rstrip("/")
