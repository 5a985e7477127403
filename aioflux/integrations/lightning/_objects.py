"""The objects of a checkpoint, found, copied and removed as one.

A checkpoint of Lightning at `C` is the object `C`, or, if several ranks wrote it, the objects below
`C/`: the data objects, `.metadata`, which commits them, and `meta.pt`.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from aioflux import sync
from aioflux._values.uri import parse_uri, split_at_bucket, split_object_uri
from aioflux.checkpoint._tag_checkpoints import COMMIT_KEY, is_save_id
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aioflux._values.meta import ObjectMeta
    from aioflux.sync import Store

__all__ = [
    "META_KEY",
    "checkpoint_exists",
    "copy_checkpoint",
    "find_checkpoints",
    "is_sharded",
    "put_below",
    "remove_checkpoint",
]

META_KEY: Final = "meta.pt"
"""Lightning's name of the object with all that is neither weights nor optimizer state."""

_PART = re.compile(r"__\d+_\d+\.distcp|(?:__\d+)?\.metadata(?:\.tmp)?|meta\.pt")


def checkpoint_exists(uri: str, options: Mapping[str, Any]) -> bool:
    """Return whether there is a checkpoint."""
    try:
        is_sharded(uri, options)
    except NotFoundError:
        return False
    return True


def find_checkpoints(uri: str, pattern: re.Pattern[str], options: Mapping[str, Any]) -> list[str]:
    """Return the checkpoints right below a prefix whose names match, as whole uris."""
    with sync.open_store(uri, **options) as store:
        listing = store.list_all(delimiter="/")
        names = [meta.key for meta in listing if pattern.fullmatch(meta.key)]
        prefixes = [each for each in listing.prefixes if pattern.fullmatch(each[:-1])]
        names += [each[:-1] for each in prefixes if _find(store, f"{each}{COMMIT_KEY}")]
        return [f"{store.uri}{name}" for name in names]


def is_sharded(uri: str, options: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is one of several objects.

    Raises:
        NotFoundError: There is none.
    """
    with _open_parent(uri, options) as (store, key):
        if _find(store, key) is not None:
            return False
        if _find(store, f"{key}/{COMMIT_KEY}") is not None:
            return True
    raise NotFoundError(
        f"{uri} is no checkpoint: there is neither an object of this name nor {uri}/{COMMIT_KEY}",
        uri=uri,
    )


def copy_checkpoint(source: str, uri: str, options: Mapping[str, Any]) -> None:
    """Copy a checkpoint on the service; one that is at `uri` stays whole until it is replaced.

    Raises:
        NotFoundError: There is no such checkpoint.
        ValueError: The two are not in one bucket.
    """
    bucket, origin = split_at_bucket(parse_uri(source))
    target_bucket, target = split_at_bucket(parse_uri(uri))
    if bucket != target_bucket:
        raise ValueError(f"{source} is copied on the service, within its bucket, not to {uri}")
    with sync.open_store(bucket, **options) as store:
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


def put_below(uri: str, key: str, data: bytes, options: Mapping[str, Any]) -> None:
    """Store an object below a sharded checkpoint that was just committed.

    An older checkpoint of one object that has its name is removed: it would be loaded instead.
    """
    with _open_parent(uri, options) as (store, name):
        store.put(f"{name}/{key}", data)
        if not uri.startswith("file://"):  # a directory has replaced the file
            with suppress(NotFoundError):
                store.delete(name)


def remove_checkpoint(uri: str, options: Mapping[str, Any]) -> None:
    """Remove a checkpoint, if there is one; objects that no save writes stay.

    The commit object of a sharded one is deleted first, and with it the checkpoint.
    """
    with _open_parent(uri, options) as (store, key):
        with suppress(NotFoundError):
            store.delete(key)
            return
        parts = _parts(store, key)
        if (commit := parts.pop(COMMIT_KEY, None)) is not None:
            _delete(store, [commit])
        _delete(store, list(parts.values()))


@contextmanager
def _open_parent(uri: str, options: Mapping[str, Any]) -> Iterator[tuple[Store, str]]:
    """Open the store that a checkpoint is directly in, and yield it with the key there."""
    store_uri, key = split_object_uri(uri.rstrip("/"))
    with sync.open_store(store_uri, **options) as store:
        yield store, key


def _find(store: Store, key: str) -> ObjectMeta | None:
    with suppress(NotFoundError):
        return store.head(key)
    return None


def _parts(store: Store, prefix: str) -> dict[str, ObjectMeta]:
    """Return the objects that saves wrote below a prefix, by their key there."""
    found = {meta.key.removeprefix(f"{prefix}/"): meta for meta in store.list_all(f"{prefix}/")}
    return {key: meta for key, meta in found.items() if _is_part(key)}


def _is_part(key: str) -> bool:
    """Return whether a save writes an object of this key below its checkpoint."""
    first, slash, _ = key.partition("/")
    return is_save_id(first) if slash else bool(_PART.fullmatch(key))


def _delete(store: Store, metas: list[ObjectMeta]) -> None:
    for error in store.delete_many(metas).errors.values():
        raise error
