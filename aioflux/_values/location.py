"""Splits of a uri into the store to open and the key in it, and the way back."""

from __future__ import annotations

import os

from aioflux._values.uri import Location, parse_uri, quote_path

__all__ = ["join_uri", "local_uri", "split_at_bucket", "split_at_parent", "split_object"]


def split_object(uri: str) -> tuple[str, str]:
    """Return the uri of the store that an object is directly in, and its key there.

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


def join_uri(store_uri: str, key: str) -> str:
    """Return the whole uri of a key of a store."""
    root = store_uri if store_uri.endswith("/") else f"{store_uri}/"
    return root + (quote_path(key) if root.startswith("file:") else key)


def local_uri(path: str | os.PathLike[str]) -> str:
    """Return the uri of a local path, relative or absolute."""
    return f"file://{quote_path(os.path.abspath(path))}"
