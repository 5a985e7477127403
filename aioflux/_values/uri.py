"""Parsing, joining and splitting of uris such as `gs://bucket/prefix` and `file:///dir`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

REMOTE_SCHEMES = ("gs", "s3", "az")
PROBED_SCHEMES = frozenset({"s3"})
"""Schemes of services that may ignore preconditions, depending on the server."""
"""Schemes of services that are reached over a network, and use credentials."""
SCHEMES = (*REMOTE_SCHEMES, "file", "memory")
"""Supported schemes. `gcs` is an alias of `gs`."""

_ALIASES = {"gcs": "gs"}
_MAX_NAME_BYTES = 1024
_CHALLENGES = ".well-known/acme-challenge/"
_OTHER_SPELLINGS: Final = (
    (r"(gs|s3|az):/?([^/].*)", r"\1://\2"),
    (r"s3[an]://(.+)", r"s3://\1"),
    (r"(?:abfs|wasb)s?://([^/@]+)@([^/.]+)\.[^/]+(/.*)?", r"az://\2/\1\3"),
    (
        r"https?://storage\.(?:googleapis|cloud\.google)\.com/(?!(?:storage|upload)/)(.+)",
        r"gs://\1",
    ),
    (r"https?://([^/]+)\.storage\.googleapis\.com(/.*)?", r"gs://\1\2"),
    (r"https?://s3[^/]*\.amazonaws\.com/(.+)", r"s3://\1"),
    (r"https?://([^/]+)\.s3[^/]*\.amazonaws\.com(/.*)?", r"s3://\1\2"),
    (r"https?://([^/.]+)\.(?:blob|dfs)\.[^/]+(/.+)", r"az://\1\2"),
    (r"([a-z0-9][a-z0-9_-]{1,61}[a-z0-9](?:/.*)?)", r"gs://\1"),
)
"""Patterns of names that other programs take, and the uri that each means."""


@dataclass(frozen=True, slots=True)
class Location:
    """Scheme, bucket and key of a uri. Segments `.` and `..` of the key are kept."""

    scheme: str
    bucket: str
    """Name of the bucket; `account/container` for `az`; empty for `file`."""
    key: str
    """Key or prefix, without a leading slash; for `file` the absolute path, percent-decoded."""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{quote_path(self.key)}"
        root = f"{self.scheme}://{self.bucket}"
        return f"{root}/{self.key}" if self.key else root


def quote_path(path: str) -> str:
    """Encode a path for a `file` uri, in which only percent signs are encoded."""
    return path.replace("%", "%25")


def join_uri(store_uri: str, key: str) -> str:
    """Return the uri of an object, from the uri of its store and its key."""
    root = store_uri if store_uri.endswith("/") else f"{store_uri}/"
    return root + (quote_path(key) if root.startswith("file:") else key)


def local_uri(path: str | os.PathLike[str]) -> str:
    """Return the uri of a local path, relative or absolute."""
    return f"file://{quote_path(os.path.abspath(path))}"


def check_name(name: str) -> None:
    """Check that Google Cloud Storage allows the name of an object.

    Source: cloud.google.com/storage/docs/objects#naming.

    Args:
        name: Name of the object in its bucket, including the prefix of the store.

    Raises:
        ValueError: The name is not allowed.
    """
    size = len(name.encode())  # raises UnicodeEncodeError, a ValueError, for lone surrogates
    if not 1 <= size <= _MAX_NAME_BYTES:
        reason = f"it has {size} bytes of UTF-8, not 1 to {_MAX_NAME_BYTES}"
    elif name in {".", ".."}:
        reason = "in a url it would mean the bucket"
    elif "\r" in name or "\n" in name:
        reason = "it contains a line break"
    elif name.startswith(_CHALLENGES):
        reason = f"names that begin with {_CHALLENGES} are reserved"
    else:
        return
    raise ValueError(f"{name!r} is not a valid object name: {reason}")


def check_endpoint(url: str, *, may_have_path: bool = False) -> str:
    """Check the url of an endpoint, and return it with its scheme in lower case.

    Args:
        url: The url.
        may_have_path: Whether a path is allowed.

    Raises:
        ValueError: The scheme is not http or https, the url has no host, or it has credentials, a
            query, a fragment, or a path that is not allowed. The message omits parts that may be
            secret.
    """
    scheme, separator, rest = url.strip().partition("://")
    url = f"{scheme.lower()}{separator}{rest}"
    if "@" in url:
        raise ValueError(
            "endpoint_url must not have credentials in it: give scheme, host and port, and the "
            "credentials as credentials="
        )
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ValueError(
            "endpoint_url has a query or a fragment: give scheme, host and port, and a token as "
            "credentials="
        )
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(
            f"endpoint_url {url!r} is not a url of a server: write http://127.0.0.1:9000 or "
            "https://storage.example, for example"
        )
    if not may_have_path and parts.path not in {"", "/"}:
        raise ValueError(f"endpoint_url {url!r} has a path; give scheme, host and port only")
    return url


def has_scheme(key: str) -> bool:
    """Return whether a key begins with a scheme of a uri that can be opened."""
    scheme, separator, _ = key.partition("://")
    return bool(separator) and _ALIASES.get(scheme.lower(), scheme.lower()) in SCHEMES


def meant_key(key: str, root: str) -> str:
    """Return advice for a key that was not found below `root`, if it looks like a uri or a path."""
    if has_scheme(key):
        inside = key.removeprefix(root)
        advice = f"did you mean {inside!r}?" if inside != key else f"open a store of {key!r}"
        return f"; a key is relative to {root}: {advice}"
    inside = key.lstrip("/")
    return f"; did you mean {inside!r}, without a leading slash?" if inside not in {"", key} else ""


def parse_uri(uri: str) -> Location:
    """Split a uri into scheme, bucket and key.

    The key of an object store is not decoded: `gs://b/a%20b//c` has the key `a%20b//c`. Only `file`
    uris are percent-decoded, as RFC 8089 requires.

    Raises:
        TypeError: `uri` is not a string.
        ValueError: The scheme is missing or unsupported, the bucket or container is missing or an
            ARN, or the path of a `file` uri is not absolute.
    """
    if not isinstance(uri, str):
        raise TypeError(f"a uri is a string such as 'gs://bucket/prefix', not {type(uri).__name__}")
    scheme, separator, rest = uri.partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        meant = suggest_uri(uri)
        suggestion = f"; did you mean {meant}?" if meant else ""
        shown = _without_query(uri)  # which may contain a signature
        raise ValueError(
            f"{shown!r} is not a uri that aioflux can open; it must begin with one of {known}"
            f"{suggestion}"
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


def suggest_uri(text: str) -> str:
    """Return the uri that was probably meant by a text that is not a uri; empty if unknown.

    The text may be a url of a service (`https://storage.googleapis.com/bucket/key`), a uri of
    another program (`abfs://container@account.dfs.core.windows.net/key`), an absolute path, or a
    bucket or uri with parts of its scheme missing (`bucket/key`, `gs:/bucket`).
    """
    if text.startswith("/"):
        return local_uri(text)
    is_url = text.startswith(("http://", "https://"))
    for pattern, uri in _OTHER_SPELLINGS:
        if match := re.fullmatch(pattern, _without_query(text)):
            return unquote(match.expand(uri)) if is_url else match.expand(uri)
    return ""


def _without_query(text: str) -> str:
    """Return an http or https url without its query; other texts may contain a `?`."""
    return text.partition("?")[0] if text.lower().startswith(("http://", "https://")) else text


def split_object_uri(uri: str) -> tuple[str, str]:
    """Split the uri of one object at its last slash, into the uri of a store and a key.

    Raises:
        ValueError: The uri ends with a slash, or names only a bucket.
    """
    location = parse_uri(uri)
    store_uri, key = split_at_parent(location)
    if not key:
        raise ValueError(
            f"{uri!r} names no object; write the whole uri, such as "
            f"{uri}{'' if uri.endswith('/') else '/'}model.pt"
        )
    return store_uri, key


def split_at_parent(location: Location) -> tuple[str, str]:
    """Split a key at its last slash: return the uri of the parent prefix, and the last part."""
    prefix, slash, key = location.key.rpartition("/")
    return str(Location(location.scheme, location.bucket, prefix + slash)), key


def split_at_bucket(location: Location) -> tuple[str, str]:
    """Return the uri of the bucket, or of the root directory, and the whole key.

    With a store of this uri, all objects of a bucket share its connections and limits.
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
    # Not `parts.path`: urlsplit cuts the path at '?' and '#', which are allowed in a path.
    path = unquote(uri.partition("://")[2].removeprefix("localhost"), errors="surrogateescape")
    if not path.startswith("/"):
        raise ValueError(f"{uri!r} is not absolute; write file:///absolute/path")
    return Location("file", "", path)
