"""The end of a save: the commit, and objects of failed saves that are deleted.

begin    what a failed save left is deleted; the commit objects that there are, are remembered
finish   the commit object replaces the one that was remembered, or no other; what that named goes
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from aioflux.checkpoint._store.commit import commit as commit_object
from aioflux.checkpoint._store.commit import delete_logged
from aioflux.checkpoint._store.commits import read_commits
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.checkpoint.dcp._save_context import SaveContext
    from aioflux.store import Store

__all__ = ["Unfinished", "begin", "finish", "sweep"]

_log = logging.getLogger("aioflux")


class Unfinished(NamedTuple):
    """A save that was begun and not committed."""

    store: Store
    keys: Sequence[str]
    save_id: str
    context: weakref.ref[SaveContext]

    @property
    def is_over(self) -> bool:
        """Whether nobody is at it any more."""
        context = self.context()
        return context is None or context.is_over


async def begin(
    store: Store, keys: Sequence[str], unfinished: Sequence[Unfinished]
) -> tuple[CommitObject, ...]:
    """Return what a save replaces, after what failed ones left was deleted.

    Raises:
        UnsupportedError: The server ignores the condition of the commit.
    """
    await store.check_conditions()
    for each in unfinished:
        await sweep(each)
    found = await read_commits(store, "", keys)
    for each_object in found:
        if each_object.problem is not None:
            _log.warning("the checkpoint that a save replaces is damaged: %s", each_object.problem)
    return tuple(found)


async def sweep(unfinished: Unfinished) -> None:
    """Delete what a save uploaded that failed on some rank, unless it was committed after all."""
    store, save_id = unfinished.store, unfinished.save_id
    try:
        commits = await read_commits(store, "", unfinished.keys)
        if any(each.problem is not None for each in commits):
            return  # the objects that it names are unknown
        # A planner that caches plans may count saves differently on each rank: a commit of another
        # save may name objects of this one.
        made = [each.commit for each in commits if each.commit is not None]
        if any(each.save_id == save_id for each in made):
            return
        named = {stored.key for each in made for stored in each.objects}
        for prefix in (f"{save_id}/", f"model-{save_id}-"):
            await _delete_unnamed(store, prefix, named, "a save that failed")
    except AiofluxError as exc:
        _log.warning("what a failed save left below %s%s/ stays: %s", store.uri, save_id, exc)


async def finish(
    store: Store,
    key: str,
    data: bytes,
    commit: Commit,
    seen: Sequence[CommitObject],
    *,
    has_leftovers: bool = False,
) -> None:
    """Write the commit object, and delete what it replaced.

    Args:
        store: Where.
        key: Name of the commit object.
        data: Its bytes.
        commit: What it says.
        seen: The commit objects that there were when the save began.
        has_leftovers: There are objects of this save that it does not name.
    """
    await commit_object(store, key, data, commit, replaces=seen)
    if not has_leftovers:
        return
    try:
        named = {each.key for each in commit.objects}
        await _delete_unnamed(store, f"{commit.save_id}/", named, "a save")
    except AiofluxError as exc:
        _log.warning("what is left below %s%s/ stays: %s", store.uri, commit.save_id, exc)


async def _delete_unnamed(store: Store, prefix: str, named: set[str], what: str) -> None:
    listed = await store.list_all(prefix)
    await delete_logged(store, [each for each in listed if each.key not in named], what)
