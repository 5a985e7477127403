"""Entries that `info`, `ls` and `walk` return, computed from metadata and listings. Pure.

A directory exists if it is the prefix of some key. No function creates or removes a directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta

Entry = dict[str, Any]
"""Return value of `info`: name, size and type; for objects also the fields of the metadata."""


class Tree(NamedTuple):
    """Entries of the directories and objects below a path, each keyed by its own path."""

    directories: dict[str, Entry]
    """Includes the path itself if an object or a directory is below it."""
    objects: dict[str, Entry]


def directory_entry(path: str) -> Entry:
    return {"name": path, "size": 0, "type": "directory"}


def object_entry(base: str, meta: ObjectMeta) -> Entry:
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
        "contentDisposition": meta.content_disposition,
        "cacheControl": meta.cache_control,
        "storageClass": meta.storage_class,
        "metadata": dict(meta.metadata),
    }


def build_level_tree(path: str, base: str, listing: Listing) -> Tree:
    """Build a tree of one level from a listing with the delimiter "/".

    A key that ends with "/" is not an object in the tree: web consoles write such objects for empty
    directories.
    """
    names = [base + prefix[:-1] for prefix in listing.prefixes]
    directories = {name: directory_entry(name) for name in names}
    objects = _object_entries(base, listing)
    if directories or objects:
        directories[path] = directory_entry(path)
    return Tree(directories, objects)


def level_entries(base: str, listing: Listing) -> list[Entry]:
    """Return the entries of a listing of one level, sorted by name.

    With the keys `a` and `a/b`, the path `a` has two entries: first the directory, then the object.
    """
    names = [base + prefix[:-1] for prefix in listing.prefixes]
    entries = [*map(directory_entry, names), *_object_entries(base, listing).values()]
    return sorted(entries, key=lambda entry: (entry["name"], entry["type"]))


def _object_entries(base: str, listing: Listing) -> dict[str, Entry]:
    entries = (object_entry(base, meta) for meta in listing if not meta.key.endswith("/"))
    return {entry["name"]: entry for entry in entries}


def build_tree(path: str, base: str, listing: Listing) -> Tree:
    """Build a tree from a flat listing of all objects below a path."""
    directories: dict[str, Entry] = {}
    for key in listing.keys:
        parent = (base + key).rpartition("/")[0]
        while len(parent) > len(path) and parent not in directories:
            directories[parent] = directory_entry(parent)
            parent = parent.rpartition("/")[0]
    objects = _object_entries(base, listing)
    if objects or directories:
        directories[path] = directory_entry(path)
    return Tree(directories, objects)


def within_depth(path: str, names: Iterable[str], maxdepth: int | None) -> list[str]:
    """Return the names that are at most `maxdepth` levels below a path, sorted."""
    if maxdepth is None:
        return sorted(names)
    if maxdepth < 1:
        raise ValueError("maxdepth must be at least 1")
    deepest = path.rstrip("/").count("/") + maxdepth
    return sorted(name for name in names if name.count("/") <= deepest)


def walk_tree(
    path: str, tree: Tree, *, root: str, maxdepth: int | None, topdown: bool, detail: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Yield `(path, directories, objects)` for a path and for each directory below the path.

    Args:
        path: Directory to start at.
        tree: All directories and objects below `path`.
        root: Path of the filesystem's root directory.
        maxdepth: Number of levels to yield; None for all.
        topdown: Yield a directory before its subdirectories, and skip a subdirectory that the
            caller removes from the yielded list.
        detail: Yield a dictionary from name to entry, and not a list of names.
    """
    children: dict[str, tuple[dict[str, Entry], dict[str, Entry]]] = {path: ({}, {})}
    for name in tree.directories:
        children.setdefault(name, ({}, {}))
    for kind, entries in enumerate((tree.directories, tree.objects)):
        for name in sorted(entries):
            parent, _, last = name.rpartition("/")
            if name != path:
                children[parent or root][kind][last] = entries[name]

    def walk(name: str, depth: int) -> Iterator[tuple[str, Any, Any]]:
        directories, objects = children[name]
        names: Any = directories if detail else list(directories)
        step = name, names, objects if detail else list(objects)
        if topdown:
            yield step
        if maxdepth is None or depth < maxdepth:
            for directory in list(names):
                if directory in directories:
                    yield from walk(directories[directory]["name"], depth + 1)
        if not topdown:
            yield step

    return walk(path, 1)
