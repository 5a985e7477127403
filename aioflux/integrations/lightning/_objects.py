"""The objects of a checkpoint, found, copied and removed as one.

A checkpoint of Lightning at `C` is the object `C`, or, where several ranks wrote it, what is below
`C/`: the data objects, `.metadata`, which makes them a checkpoint, and `meta.pt`.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from aioflux import sync
from aioflux._values.uri import Location, parse_uri
from aioflux.checkpoint._format.commit import COMMIT_KEY, is_save_id
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aioflux._values.meta import ObjectMeta
    from aioflux.sync import Store

__all__ = ["META_KEY", "copy", "exists", "find", "is_part", "is_sharded", "put_beside", "remove"]

META_KEY: Final = "meta.pt"
"""What Lightning names the object of all that is neither weights nor optimizer state."""

_STOCK = re.compile(r"__\d+_\d+\.distcp|(?:__\d+)?\.metadata(?:\.tmp)?|meta\.pt")


def is_part(key: str) -> bool:
    """Tell whether a key below a checkpoint is one that a save writes."""
    first, slash, _ = key.partition("/")
    return is_save_id(first) if slash else bool(_STOCK.fullmatch(key))


def exists(uri: str, options: Mapping[str, Any]) -> bool:
    """Tell whether there is a checkpoint."""
    with _opened(uri, options) as (store, key):
        return _find(store, key) is not None or _find(store, f"{key}/{COMMIT_KEY}") is not None


def find(uri: str, pattern: re.Pattern[str], options: Mapping[str, Any]) -> list[str]:
    """Return the checkpoints right below a prefix whose names match, as whole uris."""
    with sync.open_store(uri, **options) as store:
        listing = store.list_all(delimiter="/")
        names = [meta.key for meta in listing if pattern.fullmatch(meta.key)]
        prefixes = [each for each in listing.prefixes if pattern.fullmatch(each[:-1])]
        names += [each[:-1] for each in prefixes if _find(store, f"{each}{COMMIT_KEY}")]
        return [f"{store.uri}{name}" for name in names]


def is_sharded(uri: str, options: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint is one of several objects.

    Raises:
        NotFoundError: There is none.
    """
    with _opened(uri, options) as (store, key):
        if _find(store, key) is not None:
            return False
        if _find(store, f"{key}/{COMMIT_KEY}") is not None:
            return True
    raise NotFoundError(
        f"{uri} is no checkpoint: there is neither an object of this name nor {uri}/{COMMIT_KEY}",
        uri=uri,
    )


def copy(source: str, uri: str, options: Mapping[str, Any]) -> None:
    """Copy a checkpoint on the service; what is at `uri` stays whole until it is replaced.

    Raises:
        NotFoundError: There is no such checkpoint.
        ValueError: The two are not in one bucket.
    """
    start, end = parse_uri(source), parse_uri(uri)
    if (start.scheme, start.bucket) != (end.scheme, end.bucket):
        raise ValueError(f"{source} is copied on the service, within its bucket, not to {uri}")
    root = Location(start.scheme, start.bucket, "/" if start.scheme == "file" else "")
    origin, target = start.key.lstrip("/"), end.key.lstrip("/")
    with sync.open_store(str(root), **options) as store:
        if (meta := _find(store, origin)) is not None:
            store.copy(meta, target)
            return
        old = _parts(store, target)
        parts = _parts(store, origin)
        if COMMIT_KEY not in parts:
            raise NotFoundError(f"{source} is no checkpoint: nothing to copy to {uri}", uri=source)
        commit = parts.pop(COMMIT_KEY)
        for key, part in parts.items():
            store.copy(part, f"{target}/{key}")
        store.copy(commit, f"{target}/{COMMIT_KEY}")
        _delete(store, [part for key, part in old.items() if key not in {*parts, COMMIT_KEY}])


def put_beside(uri: str, key: str, data: bytes, options: Mapping[str, Any]) -> None:
    """Store an object below a checkpoint that just became visible, and remove its namesake.

    A checkpoint of one object that had this name before would be loaded in its place.
    """
    with _opened(uri, options) as (store, name):
        store.put(f"{name}/{key}", data)
        if not uri.startswith("file://"):  # there the directory has the name already
            with suppress(NotFoundError):
                store.delete(name)


def remove(uri: str, options: Mapping[str, Any]) -> None:
    """Remove a checkpoint, if there is one; what no save writes stays.

    One of several objects loses its commit object first: from then on it is none.
    """
    with _opened(uri, options) as (store, key):
        with suppress(NotFoundError):
            store.delete(key)
            return
        parts = _parts(store, key)
        if (commit := parts.pop(COMMIT_KEY, None)) is not None:
            _delete(store, [commit])
        _delete(store, list(parts.values()))


@contextmanager
def _opened(uri: str, options: Mapping[str, Any]) -> Iterator[tuple[Store, str]]:
    """Open the store that a checkpoint is in, and give its key there."""
    location = parse_uri(uri)
    prefix, slash, key = location.key.rstrip("/").rpartition("/")
    if not key:
        raise ValueError(f"{uri!r} names no checkpoint; write all of it, down to its name")
    root = Location(location.scheme, location.bucket, prefix + slash)
    with sync.open_store(str(root), **options) as store:
        yield store, key


def _find(store: Store, key: str) -> ObjectMeta | None:
    with suppress(NotFoundError):
        return store.head(key)
    return None


def _parts(store: Store, prefix: str) -> dict[str, ObjectMeta]:
    """Return what saves wrote below a prefix, by its key there."""
    found = {meta.key.removeprefix(f"{prefix}/"): meta for meta in store.list_all(f"{prefix}/")}
    return {key: meta for key, meta in found.items() if is_part(key)}


def _delete(store: Store, metas: list[ObjectMeta]) -> None:
    for error in store.delete_many(metas).errors.values():
        raise error
