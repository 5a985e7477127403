"""Paths of fsspec, split into the uri of a store and a key. Pure.

A path has the form `bucket/key`. With `az` the form is `account/container/key`, and with `file` it
is `/absolute/path`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aioflux._values.uri import Location, join_uri, split_at_bucket, split_at_parent


class ObjectPath(NamedTuple):
    """A path of fsspec, split into the uri of a store and a key or prefix."""

    store_uri: str
    base: str
    """The part of the path before the key."""
    key: str
    """Empty if the path names the whole store."""

    @property
    def prefix(self) -> str:
        """The common prefix of all keys below this path."""
        return f"{self.key}/" if self.key else ""

    @property
    def path(self) -> str:
        """The whole path, without a trailing slash."""
        return self.base + self.key if self.key else self.base.rstrip("/") or self.base

    @property
    def uri(self) -> str:
        return join_uri(self.store_uri, self.key)


def strip_protocol(path: str, protocols: Iterable[str], root: str) -> str:
    """Remove the protocol and trailing slashes of a path."""
    for protocol in protocols:
        for separator in ("://", "::"):
            path = path.removeprefix(protocol + separator)
    return path.rstrip("/") or root


def split_path(scheme: str, path: str) -> ObjectPath:
    """Split a path that `strip_protocol` returned.

    All objects of a bucket share one store and its connections. The store of a local file is its
    parent directory, because a delete also removes the directories above a file that become empty,
    except the directory of the store.

    Raises:
        ValueError: The path names no bucket, or is not absolute for `file`.
    """
    if scheme == "file":
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not absolute; write /absolute/path")
        store_uri, key = split_at_parent(Location("file", "", path))
    else:
        bucket, _, key = path.partition("/")
        if scheme == "az" and bucket:
            container, _, key = key.partition("/")
            bucket = f"{bucket}/{container}" if container else ""
        if not bucket:
            form = "account/container/prefix" if scheme == "az" else "bucket/prefix"
            raise ValueError(f"{path!r} names no bucket; buckets cannot be listed: write {form}")
        store_uri, key = split_at_bucket(Location(scheme, bucket, key))
        path = f"{bucket}/{key}"
    return ObjectPath(store_uri, path.removesuffix(key), key)
