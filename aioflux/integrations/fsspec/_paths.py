"""Which store and key a path of fsspec means, and what fsspec is told of objects. Pure.

A path is `bucket/key`; `account/container/key` for `az`; an absolute path for `file`. A directory
is what some object lies below: there are no others, and nothing makes or removes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from aioflux._values.uri import Location

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "Entry",
    "Place",
    "Tree",
    "directory",
    "entry",
    "level",
    "place_of",
    "plan_slice",
    "strip",
    "tree_of",
    "within_depth",
]

Entry = dict[str, Any]
"""What `info` returns: name, size, type, and more for objects."""


class Place(NamedTuple):
    """A store, and a key or a prefix in it."""

    store: str
    """Uri of the store."""
    base: str
    """What paths begin with, before the key."""
    key: str
    """Key; empty for the store itself."""

    @property
    def prefix(self) -> str:
        """What the keys below this one begin with."""
        return f"{self.key}/" if self.key else ""

    @property
    def path(self) -> str:
        """The path that this is the place of."""
        return self.base + self.key if self.key else self.base.rstrip("/") or self.base


def strip(path: str, protocols: Iterable[str], root: str) -> str:
    """Return a path without protocol and without slashes at its end."""
    for protocol in protocols:
        for mark in ("://", "::"):
            path = path.removeprefix(protocol + mark)
    return path.rstrip("/") or root


def place_of(scheme: str, path: str) -> Place:
    """Return the place of a path that `strip` returned.

    A bucket is one store, whose connections its objects share. A local directory is one for what is
    directly in it, so that nobody takes the directories above for prefixes that a delete empties.

    Raises:
        ValueError: It is empty, or not absolute where it has to be.
    """
    if scheme != "file":
        bucket, _, key = path.partition("/")
        if scheme == "az" and bucket:
            container, _, key = key.partition("/")
            bucket = f"{bucket}/{container}" if container else ""
        if not bucket:
            what = "account/container/prefix" if scheme == "az" else "bucket/prefix"
            raise ValueError(f"{path!r} names no bucket, and buckets are not listed; write {what}")
        return Place(str(Location(scheme, bucket, "")), f"{bucket}/", key)
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not absolute; write /absolute/path")
    parent, _, name = path.rpartition("/")
    return Place(str(Location("file", "", f"{parent}/")), f"{parent}/", name)


def directory(path: str) -> Entry:
    """Describe a directory."""
    return {"name": path, "size": 0, "type": "directory"}


def entry(base: str, meta: ObjectMeta) -> Entry:
    """Describe an object."""
    return {
        "name": base + meta.key,
        "size": meta.size,
        "type": "file",
        "mtime": meta.updated,
        "etag": meta.etag,
        "generation": meta.generation,
        "crc32c": meta.crc32c,
        "contentType": meta.content_type,
        "contentEncoding": meta.content_encoding,
        "storageClass": meta.storage_class,
        "metadata": dict(meta.metadata),
    }


def level(base: str, listing: Listing) -> list[Entry]:
    """Describe what a listing of one level holds, sorted by name.

    A key that ends with "/", which consoles put in place of directories, is the directory itself.
    """
    found = {f"{base}{prefix[:-1]}": directory(base + prefix[:-1]) for prefix in listing.prefixes}
    for meta in _objects(listing):
        # Where there is `a` and `a/b`, `a` is an object and a directory; who asks hears of both.
        found[f"{base}{meta.key}\0"] = entry(base, meta)
    return [found[name] for name in sorted(found)]


def _objects(listing: Listing) -> Iterator[ObjectMeta]:
    return (meta for meta in listing if not meta.key.endswith("/"))


class Tree(NamedTuple):
    """Directories and objects below a path, each by its path."""

    directories: dict[str, Entry]
    """With the path itself, where that is one."""
    objects: dict[str, Entry]


def tree_of(path: str, base: str, listing: Listing) -> Tree:
    """Make directories of a flat listing of what is below a path."""
    directories: dict[str, Entry] = {}
    objects: dict[str, Entry] = {}
    for meta in listing:
        name = base + meta.key
        if not meta.key.endswith("/"):
            objects[name] = entry(base, meta)
        parent = name.rpartition("/")[0]
        while len(parent) > len(path) and parent not in directories:
            directories[parent] = directory(parent)
            parent = parent.rpartition("/")[0]
    if objects or directories:
        directories[path] = directory(path)
    return Tree(directories, objects)


def within_depth(path: str, names: Iterable[str], maxdepth: int | None) -> list[str]:
    """Return the names at most `maxdepth` levels below a path, sorted.

    Raises:
        ValueError: `maxdepth` is below 1.
    """
    if maxdepth is None:
        return sorted(names)
    if maxdepth < 1:
        raise ValueError("maxdepth must be at least 1")
    deepest = path.rstrip("/").count("/") + maxdepth
    return sorted(name for name in names if name.count("/") <= deepest)


def plan_slice(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Return which bytes `[start, end)` a slice of so many means, as Python's own slices do."""
    first, behind, _ = slice(start, end).indices(size)
    return first, max(first, behind)
