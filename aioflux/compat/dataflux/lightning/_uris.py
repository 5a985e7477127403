"""Conversion of the old library's paths to uris; pure functions."""

from __future__ import annotations

import os
import re

from aioflux.integrations.lightning._uris import to_uri

_CLOUD = re.compile(r"gc?s:/(/?)(?P<bucket>[^/]*)(?P<rest>.*)", re.DOTALL)


def uri_of(path: str | os.PathLike[str]) -> str:
    """Return the uri of a path.

    Args:
        path: `gs://bucket/key` or `gcs://bucket/key`, also after `pathlib.Path` has removed a
            slash. A path without a scheme is on the local disk, where Lightning saves by default.

    Raises:
        TypeError: The path is neither a string nor a path object.
        ValueError: The path is empty, has no bucket, or has another scheme.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a path is a str or a pathlib.Path, not {type(path).__name__}")
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is empty; write gs://bucket/key")
    match = _CLOUD.fullmatch(text)
    if match is None:
        if "://" in text and not text.startswith("file://"):
            raise ValueError(f"{text!r} does not begin with gs:// or gcs://")
        return to_uri(text)
    if not match["bucket"]:
        raise ValueError(f"{text!r} names no bucket; write gs://bucket/key")
    return f"gs://{match['bucket']}{match['rest']}"


def gcs_uri(path: str | os.PathLike[str]) -> str:
    """Return the uri of a path in a bucket.

    Raises:
        TypeError: The path is neither a string nor a path object.
        ValueError: The path is not in a bucket.
    """
    uri = uri_of(path)
    if not uri.startswith("gs://"):
        raise ValueError(f"{os.fspath(path)!r} does not begin with gs:// or gcs://")
    return uri
