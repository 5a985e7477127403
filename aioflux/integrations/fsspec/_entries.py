"""Entries of `info`, `ls` and `walk`, made of metadata and listings. Pure.

A directory is the prefix of some object: there are no others, and nothing makes or removes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "Entry",
    "Tree",
    "directory_entry",
    "level_entries",
    "level_tree",
    "object_entry",
    "tree_of",
    "walk_tree",
    "within_depth",
]

Entry = dict[str, Any]
"""Return value of `info`: name, size, type, and more for objects."""


class Tree(NamedTuple):
    """Directories and objects below a path, each by its path."""

    directories: dict[str, Entry]
    """Includes the path itself if anything is below it."""
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
        "storageClass": meta.storage_class,
        "metadata": dict(meta.metadata),
    }


def level_tree(path: str, base: str, listing: Listing) -> Tree:
    """Return the tree of a listing of one level.

    A key that ends with "/", which consoles write as an empty directory, is the directory itself.
    """
    names = [base + prefix[:-1] for prefix in listing.prefixes]
    directories = {name: directory_entry(name) for name in names}
    objects = _object_entries(base, listing)
    if directories or objects:
        directories[path] = directory_entry(path)
    return Tree(directories, objects)


def level_entries(base: str, listing: Listing) -> list[Entry]:
    """Describe directories and objects of a listing of one level, sorted by name.

    With `a` and `a/b`, `a` is a directory and an object: both are described, in this order.
    """
    names = [base + prefix[:-1] for prefix in listing.prefixes]
    entries = [*map(directory_entry, names), *_object_entries(base, listing).values()]
    return sorted(entries, key=lambda entry: (entry["name"], entry["type"]))


def _object_entries(base: str, listing: Listing) -> dict[str, Entry]:
    entries = (object_entry(base, meta) for meta in listing if not meta.key.endswith("/"))
    return {entry["name"]: entry for entry in entries}


def tree_of(path: str, base: str, listing: Listing) -> Tree:
    """Return the tree of a flat listing of all objects below a path."""
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


def walk_tree(
    path: str, tree: Tree, *, root: str, maxdepth: int | None, topdown: bool, detail: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Yield `(path, directories, objects)` of a path and of the directories below it.

    Args:
        path: Top of the walk.
        tree: All below it.
        root: Parent of names without a slash before them.
        maxdepth: Levels to enter; None for all.
        topdown: Yield a directory before those in it, and skip those that the caller removes.
        detail: Yield entries by name in place of names.
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
            for each in list(names):
                if each in directories:
                    yield from walk(directories[each]["name"], depth + 1)
        if not topdown:
            yield step

    return walk(path, 1)
