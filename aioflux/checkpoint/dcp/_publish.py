"""Making a save visible, and deleting what it replaced or what a failed one left.

begin    what a failed save left is deleted; the commit objects that there are, are remembered
finish   the commit object replaces the one that was remembered, or no other; what that named goes
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, NamedTuple

from aioflux.checkpoint._store.commits import decode, is_home
from aioflux.checkpoint._store.objects import publish
from aioflux.errors import AiofluxError, CheckpointCorruptError, NotFoundError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint.dcp._save_context import Turn
    from aioflux.store import Store

__all__ = ["Seen", "Unfinished", "begin", "finish", "sweep"]

_log = logging.getLogger("aioflux")


class Seen(NamedTuple):
    """A commit object that was there when the save began."""

    meta: ObjectMeta
    commit: Commit | None
    is_damaged: bool = False


class Unfinished(NamedTuple):
    """A save that was begun and not committed."""

    store: Store
    keys: Sequence[str]
    save_id: str
    turn: weakref.ref[Turn]

    @property
    def is_over(self) -> bool:
        """Whether nobody is at it any more."""
        turn = self.turn()
        return turn is None or turn.is_over


async def begin(
    store: Store, keys: Sequence[str], unfinished: Sequence[Unfinished]
) -> tuple[Seen, ...]:
    """Return what a save replaces, after what failed ones left was deleted.

    Raises:
        UnsupportedError: The server ignores the condition of the commit.
    """
    await store.check_conditions()
    for each in unfinished:
        await sweep(each)
    return await _look(store, keys)


async def _look(store: Store, keys: Sequence[str]) -> tuple[Seen, ...]:
    """Return the commit objects that there are."""
    seen = list[Seen]()
    async for batch in store.fetch_batches(keys, return_exceptions=True):
        for each in batch:
            if each[0] is not None:
                seen.append(_decode(*each))
            elif not isinstance(each[1], NotFoundError):
                raise each[1]
    return tuple(seen)


def _decode(meta: ObjectMeta, data: bytes) -> Seen:
    try:
        return Seen(meta, decode(meta, data))
    except CheckpointCorruptError as exc:
        _log.warning("the checkpoint that a save replaces is damaged: %s", exc)
        return Seen(meta, None, is_damaged=True)


async def sweep(unfinished: Unfinished) -> None:
    """Delete what a save uploaded that failed on some rank, unless it was committed after all."""
    store, save_id = unfinished.store, unfinished.save_id
    try:
        seen = await _look(store, unfinished.keys)
        if any(each.is_damaged for each in seen):
            return  # nobody can tell what it names
        # Whoever caches plans may count saves differently on each rank: a commit of another save
        # may name objects of this one.
        named = _named(each.commit for each in seen)
        if any(each.commit is not None and each.commit.save_id == save_id for each in seen):
            return
        for prefix in (f"{save_id}/", f"model-{save_id}-"):
            listed = [each for each in await store.list_all(prefix) if each.key not in named]
            await _delete(store, listed, "a save that failed")
    except AiofluxError as exc:
        _log.warning("what a failed save left below %s%s/ stays: %s", store.uri, save_id, exc)


async def finish(
    store: Store,
    key: str,
    data: bytes,
    commit: Commit,
    seen: Sequence[Seen],
    *,
    content_type: str = "",
    has_leftovers: bool = False,
) -> None:
    """Write the commit object, and delete what it replaced.

    Args:
        store: Where.
        key: Name of the commit object.
        data: Its bytes.
        commit: What it says.
        seen: The commit objects that there were when the save began.
        content_type: Media type.
        has_leftovers: There are objects of this save that it does not name.
    """
    replaces = next((each.meta for each in seen if each.meta.key == key), None)
    await publish(store, key, data, replaces=replaces, content_type=content_type)
    if has_leftovers:
        await _delete_unnamed(store, commit)
    for each in seen:
        await _discard(store, each, commit, is_replaced=each.meta.key == key)


def _named(commits: Iterable[Commit | None]) -> set[str]:
    return {each.key for commit in commits if commit is not None for each in commit.objects}


async def _delete_unnamed(store: Store, commit: Commit) -> None:
    named = {each.key for each in commit.objects}
    try:
        listed = await store.list_all(f"{commit.save_id}/")
    except AiofluxError as exc:
        _log.warning("what is left below %s%s/ stays: %s", store.uri, commit.save_id, exc)
        return
    await _delete(store, [each for each in listed if each.key not in named], "a save")


async def _discard(store: Store, old: Seen, commit: Commit, *, is_replaced: bool) -> None:
    """Delete what a commit object names that is not in force any more; log what cannot be."""
    if old.commit is None:
        _log.info("what %s named stays: it is no commit of aioflux", old.meta.uri)
        return
    if not is_replaced and not await _delete(store, [old.meta], "another layout"):
        return
    is_pinned = is_home(store, "", old.commit)
    named = _named([commit])
    doomed = [
        dataclasses.replace(
            old.meta,
            key=each.key,
            uri=f"{store.uri}{each.key}",
            generation=each.generation if is_pinned else "",
        )
        for each in old.commit.objects
        if each.key not in named
    ]
    await _delete(store, doomed, "the checkpoint that was replaced")


async def _delete(store: Store, metas: Iterable[ObjectMeta], what: str) -> bool:
    """Delete objects, and tell whether all are gone; what stays is logged."""
    try:
        errors = (await store.delete_many(metas)).errors
    except (AiofluxError, OSError, ValueError) as exc:  # what was committed stays committed
        _log.warning("%s below %s could not be deleted: %s", what, store.uri, exc)
        return False
    for key, error in errors.items():
        _log.warning("%s%s of %s could not be deleted: %s", store.uri, key, what, error)
    return not errors
