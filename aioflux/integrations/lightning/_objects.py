"""Functions that find, copy and remove all objects of a Lightning checkpoint.

A checkpoint at the uri `C` is either one object with this uri, or it is sharded: several objects
below `C/`, namely data objects of all ranks, the commit object `.metadata`, and `meta.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from aioflux import sync
from aioflux._values.uri import parse_uri, split_at_bucket, split_object_uri
from aioflux.checkpoint._tag_checkpoints import COMMIT_KEY, is_save_id
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.sync import Store

META_KEY: Final = "meta.pt"
"""Lightning's name for the object with the trainer data: all but weights and optimizer states."""

_PART_KEY = re.compile(r"__\d+_\d+\.distcp|(?:__\d+)?\.metadata(?:\.tmp)?|meta\.pt")


def checkpoint_exists(uri: str, options: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint exists at a uri."""
    try:
        is_sharded(uri, options)
    except NotFoundError:
        return False
    return True


def find_checkpoints(
    uri: str, pattern: re.Pattern[str], options: Mapping[str, Any]
) -> dict[str, datetime | None]:
    """Return the uris of checkpoints directly below a prefix, each with its time.

    The names of the checkpoints match a pattern. Of a sharded one, it is the time of its commit.
    """
    with sync.open_store(uri, **options) as store:
        listing = store.list_all(delimiter="/")
        found = {meta.key: meta for meta in listing if pattern.fullmatch(meta.key)}
        for prefix in listing.prefixes:
            if pattern.fullmatch(prefix[:-1]) and (meta := _head(store, prefix + COMMIT_KEY)):
                found[prefix[:-1]] = meta
        return {f"{store.uri}{name}": meta.updated for name, meta in found.items()}


def is_sharded(uri: str, options: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint consists of several objects.

    Raises:
        NotFoundError: No checkpoint exists at the uri.
    """
    with _open_parent(uri, options) as (store, key):
        if _head(store, key) is not None:
            return False
        if _head(store, f"{key}/{COMMIT_KEY}") is not None:
            return True
    raise NotFoundError(
        f"there is no checkpoint {uri}: neither this object nor {uri}/{COMMIT_KEY} exists",
        uri=uri,
    )


def copy_checkpoint(source: str, uri: str, options: Mapping[str, Any]) -> None:
    """Copy a checkpoint from `source` to `uri`, by server-side copies.

    A sharded checkpoint that exists at `uri` can be loaded until the last copy replaces its commit
    object, but `meta.pt` is replaced before that.

    Raises:
        NotFoundError: The source does not exist.
        ValueError: The source and `uri` are not in the same bucket.
    """
    bucket, origin = split_at_bucket(parse_uri(source))
    target_bucket, target = split_at_bucket(parse_uri(uri))
    if bucket != target_bucket:
        raise ValueError(f"{source} can only be copied within its bucket, not to {uri}")
    with sync.open_store(bucket, **options) as store:
        if (meta := _head(store, origin)) is not None:
            store.copy(meta, target)
            return
        old = _list_parts(store, target)
        parts = _list_parts(store, origin)
        if COMMIT_KEY not in parts:
            raise NotFoundError(f"there is no checkpoint {source} to copy to {uri}", uri=source)
        commit = parts.pop(COMMIT_KEY)
        for key, part in parts.items():
            store.copy(part, f"{target}/{key}")
        store.copy(commit, f"{target}/{COMMIT_KEY}")
        _delete(store, [part for key, part in old.items() if key not in {*parts, COMMIT_KEY}])


def put_below(uri: str, key: str, data: bytes, options: Mapping[str, Any]) -> None:
    """Store an object below a sharded checkpoint that was just committed.

    An older checkpoint of one object at the same uri is deleted, because loads would prefer it.
    """
    with _open_parent(uri, options) as (store, name):
        store.put(f"{name}/{key}", data)
        if not uri.startswith("file://"):  # for files, the new directory has replaced the object
            with suppress(NotFoundError):
                store.delete(name)


def remove_checkpoint(uri: str, options: Mapping[str, Any]) -> None:
    """Remove the checkpoint at a uri if one exists.

    Of a sharded checkpoint, the commit object is deleted first. Objects below the uri that are not
    part of a save remain.
    """
    with _open_parent(uri, options) as (store, key):
        with suppress(NotFoundError):
            store.delete(key)
            return
        parts = _list_parts(store, key)
        if (commit := parts.pop(COMMIT_KEY, None)) is not None:
            _delete(store, [commit])
        _delete(store, list(parts.values()))


@contextmanager
def _open_parent(uri: str, options: Mapping[str, Any]) -> Iterator[tuple[Store, str]]:
    """Open a store at the parent of a checkpoint, and yield the store and the checkpoint's key."""
    store_uri, key = split_object_uri(uri.rstrip("/"))
    with sync.open_store(store_uri, **options) as store:
        yield store, key


def _head(store: Store, key: str) -> ObjectMeta | None:
    with suppress(NotFoundError):
        return store.head(key)
    return None


def _list_parts(store: Store, prefix: str) -> dict[str, ObjectMeta]:
    """Return the objects of a sharded checkpoint, by their key relative to the checkpoint."""
    metas = {meta.key.removeprefix(f"{prefix}/"): meta for meta in store.list_all(f"{prefix}/")}
    return {key: meta for key, meta in metas.items() if _is_part(key)}


def _is_part(key: str) -> bool:
    """Return whether a save writes an object with this key, relative to its checkpoint."""
    first, slash, _ = key.partition("/")
    return is_save_id(first) if slash else bool(_PART_KEY.fullmatch(key))


def _delete(store: Store, metas: list[ObjectMeta]) -> None:
    for error in store.delete_many(metas).errors.values():
        raise error
