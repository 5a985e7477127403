"""Uris: `gs://bucket/prefix`, `az://account/container/prefix`, `file:///dir`, and so on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

__all__ = [
    "REMOTE_SCHEMES",
    "SCHEMES",
    "Location",
    "check_endpoint",
    "check_name",
    "join_uri",
    "local_uri",
    "parse_uri",
    "quote_path",
    "split_at_bucket",
    "split_at_parent",
    "split_object_uri",
]

REMOTE_SCHEMES = ("gs", "s3", "az")
"""Schemes of services with buckets and credentials."""
SCHEMES = (*REMOTE_SCHEMES, "file", "memory")
"""Schemes that aioflux knows; `gcs` is taken for `gs`."""

_ALIASES = {"gcs": "gs"}
_MAX_NAME_BYTES = 1024
_CHALLENGES = ".well-known/acme-challenge/"


@dataclass(frozen=True, slots=True)
class Location:
    """Scheme, bucket and key of a uri, all literal: not decoded, with dots."""

    scheme: str
    bucket: str
    """Name of the bucket; for `az` account and container, `account/container`; for `file` the empty
    string."""
    key: str
    """Key or prefix in the bucket, with no leading slash; for `file` the absolute path."""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{quote_path(self.key)}"
        root = f"{self.scheme}://{self.bucket}"
        return f"{root}/{self.key}" if self.key else root


def quote_path(path: str) -> str:
    """Return a path as in a `file` uri, in which percent signs alone are encoded."""
    return path.replace("%", "%25")


def join_uri(store_uri: str, key: str) -> str:
    """Return the whole uri of a key of a store."""
    root = store_uri if store_uri.endswith("/") else f"{store_uri}/"
    return root + (quote_path(key) if root.startswith("file:") else key)


def local_uri(path: str | os.PathLike[str]) -> str:
    """Return the uri of a local path, relative or absolute."""
    return f"file://{quote_path(os.path.abspath(path))}"


def check_name(name: str) -> None:
    """Raise ValueError for a name that no object of Cloud Storage can have.

    Source: cloud.google.com/storage/docs/objects#naming.

    Args:
        name: The whole name, with the store's prefix.
    """
    size = len(name.encode())  # raises for invalid Unicode
    if not 1 <= size <= _MAX_NAME_BYTES:
        reason = f"it has {size} bytes of UTF-8, not 1 to {_MAX_NAME_BYTES}"
    elif name in {".", ".."}:
        reason = "in a url it would mean the bucket"
    elif "\r" in name or "\n" in name:
        reason = "it contains the end of a line"
    elif name.startswith(_CHALLENGES):
        reason = f"names that begin with {_CHALLENGES} are reserved"
    else:
        return
    raise ValueError(f"{name!r} is not a valid object name: {reason}")


def check_endpoint(url: str, *, may_have_path: bool = False) -> str:
    """Return the url of a server, with its scheme in lower case.

    Args:
        url: The url.
        may_have_path: A path is allowed.

    Raises:
        ValueError: It is not a url of a server, or has more in it; the message leaves out what may
            be a secret.
    """
    scheme, separator, rest = url.strip().partition("://")
    url = f"{scheme.lower()}{separator}{rest}"
    if "@" in url:
        raise ValueError(
            "endpoint_url has credentials in it, which is not accepted: give scheme, host and "
            "port, and the credentials as credentials="
        )
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ValueError(
            "endpoint_url has a query or a fragment: give scheme, host and port, and a token as "
            "credentials="
        )
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(
            f"endpoint_url {url!r} is no url of a server: write it as http://127.0.0.1:9000 or "
            "https://storage.example"
        )
    if not may_have_path and parts.path not in {"", "/"}:
        raise ValueError(f"endpoint_url {url!r} has a path; give scheme, host and port only")
    return url


def parse_uri(uri: str) -> Location:
    """Split a uri into scheme, bucket and key.

    The key of an object store is literal: `gs://b/a%20b//c` names the key `a%20b//c`.
    Only `file` uris are percent-decoded, by RFC 8089.

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
    if scheme == "az":
        account, (container, _, key) = bucket, key.partition("/")
        if not account or not container:
            raise ValueError(
                f"{uri!r} names no container; write az://account/container/prefix, the storage "
                "account first"
            )
        bucket = f"{account}/{container}"
    if not bucket:
        raise ValueError(f"{uri!r} names no bucket; write {scheme}://bucket/prefix")
    if scheme == "s3" and bucket.startswith("arn:"):
        raise ValueError(
            f"{uri!r} names an ARN, which is not supported; write the alias of the access point "
            "(it ends with -s3alias) in place of the bucket"
        )
    return Location(scheme, bucket, key)


def split_object_uri(uri: str) -> tuple[str, str]:
    """Split the uri of one object into the uri of a store and the key in it, at the last slash.

    Raises:
        ValueError: The uri names no object.
    """
    location = parse_uri(uri)
    store_uri, key = split_at_parent(location)
    if not key:
        raise ValueError(
            f"{uri!r} names no object; write all of it, such as {location.scheme}://bucket/model.pt"
        )
    return store_uri, key


def split_at_parent(location: Location) -> tuple[str, str]:
    """Return the uri of the parent prefix or directory, and the last part of the key."""
    prefix, slash, key = location.key.rpartition("/")
    return str(Location(location.scheme, location.bucket, prefix + slash)), key


def split_at_bucket(location: Location) -> tuple[str, str]:
    """Return the uri of the bucket, or of the root directory, and the whole key or prefix.

    The objects of a bucket then share one store, with its connections and limits.
    """
    root = "/" if location.scheme == "file" else ""
    key = location.key.removeprefix(root)
    return str(Location(location.scheme, location.bucket, root)), key


def _parse_file(uri: str) -> Location:
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"}:
        raise ValueError(
            f"{uri!r} names the host {parts.netloc!r}; a local directory is file:///absolute/path"
        )
    # urlsplit cuts '?' and '#', which are ordinary characters of a path.
    path = unquote(uri.partition("://")[2].removeprefix("localhost"), errors="surrogateescape")
    if not path.startswith("/"):
        raise ValueError(f"{uri!r} is not absolute; write file:///absolute/path")
    return Location("file", "", path)
