"""Paths of fsspec, split into a store and a key. Pure.

A path is `bucket/key`; `account/container/key` for `az`; an absolute path for `file`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aioflux._values.uri import Location, join_uri, split_at_bucket, split_at_parent

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ObjectPath", "split_path", "strip_protocol"]


class ObjectPath(NamedTuple):
    """A path: a store, and a key or a prefix in it."""

    store_uri: str
    base: str
    """Beginning of the path, before the key."""
    key: str
    """Key; empty for the store itself."""

    @property
    def prefix(self) -> str:
        """Prefix of the keys below this path."""
        return f"{self.key}/" if self.key else ""

    @property
    def path(self) -> str:
        """The path as fsspec writes it."""
        return self.base + self.key if self.key else self.base.rstrip("/") or self.base

    @property
    def uri(self) -> str:
        """Whole uri of the object."""
        return join_uri(self.store_uri, self.key)


def strip_protocol(path: str, protocols: Iterable[str], root: str) -> str:
    """Return a path without protocol and without trailing slashes."""
    for protocol in protocols:
        for mark in ("://", "::"):
            path = path.removeprefix(protocol + mark)
    return path.rstrip("/") or root


def split_path(scheme: str, path: str) -> ObjectPath:
    """Split a path that `strip_protocol` returned.

    A bucket is one store, whose objects share connections. A local directory is a store of the
    files directly in it, so that a delete never removes the directories above as empty prefixes.

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
            wanted = "account/container/prefix" if scheme == "az" else "bucket/prefix"
            raise ValueError(
                f"{path!r} names no bucket, and buckets cannot be listed; write {wanted}"
            )
        store_uri, key = split_at_bucket(Location(scheme, bucket, key))
        path = f"{bucket}/{key}"
    return ObjectPath(store_uri, path.removesuffix(key), key)
