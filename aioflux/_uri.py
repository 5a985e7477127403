"""Uris: `gs://bucket/prefix`, `file:///dir`, `memory://name/prefix`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

__all__ = ["SCHEMES", "Location", "parse_uri", "quote_path"]

SCHEMES = ("gs", "s3", "az", "file", "memory")
"""Schemes that aioflux knows; `gcs` is taken for `gs`."""

_ALIASES = {"gcs": "gs"}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a uri points: scheme, bucket and the rest.

    All of it is literal: no percent-decoding, no removal of dots.
    """

    scheme: str
    bucket: str
    """Name of the bucket; for `file` the empty string."""
    key: str
    """Key or prefix in the bucket, with no leading slash; for `file` the absolute path."""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{quote_path(self.key)}"
        root = f"{self.scheme}://{self.bucket}"
        return f"{root}/{self.key}" if self.key else root


def quote_path(path: str) -> str:
    """Write a path as a `file` uri writes it: only what would be decoded is encoded."""
    return path.replace("%", "%25")


def parse_uri(uri: str) -> Location:
    """Split a uri into scheme, bucket and key.

    The key of an object store is taken as it stands: `gs://b/a%20b//c` names the key `a%20b//c`.
    Only `file` uris are percent-decoded, as RFC 8089 says.

    Raises:
        ValueError: The text has no scheme, an unknown one, or no bucket.
    """
    if not isinstance(uri, str):
        raise TypeError(f"a uri is a string such as 'gs://bucket/prefix', not {type(uri).__name__}")
    scheme, separator, rest = uri.partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(
            f"{uri!r} is not a uri that aioflux can open; it must begin with one of {known}"
        )
    if scheme == "file":
        return _parse_file(uri)
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ValueError(f"{uri!r} names no bucket; write {scheme}://bucket/prefix")
    return Location(scheme, bucket, key)


def _parse_file(uri: str) -> Location:
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"}:
        raise ValueError(
            f"{uri!r} names the host {parts.netloc!r}; a local directory is file:///absolute/path"
        )
    # urlsplit cuts '?' and '#', which are ordinary characters of a path.
    path = unquote(uri.partition("://")[2].removeprefix("localhost"))
    if not path.startswith("/"):
        raise ValueError(f"{uri!r} is not absolute; write file:///absolute/path")
    return Location("file", "", path)
