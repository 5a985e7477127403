"""The begin and the end of a save: clean-up of failed saves, and the commit.

begin_save    deletes objects of failed saves, and reads the existing commit objects
finish_save   replaces the commit object that was read, if any, and deletes its objects
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

__all__ = ["UnfinishedSave", "begin_save", "delete_failed", "finish_save"]

_log = logging.getLogger("aioflux")


class UnfinishedSave(NamedTuple):
    """A save that was started and not committed."""

    store: Store
    keys: Sequence[str]
    save_id: str
    context: weakref.ref[SaveContext]

    @property
    def is_over(self) -> bool:
        """Return whether it has ended or failed."""
        context = self.context()
        return context is None or context.is_over


async def begin_save(
    store: Store, keys: Sequence[str], unfinished: Sequence[UnfinishedSave]
) -> tuple[CommitObject, ...]:
    """Delete the objects of failed saves, and return the commit objects that a save replaces.

    Raises:
        UnsupportedError: The server ignores the condition of the commit.
    """
    await store.check_conditions()
    for each in unfinished:
        await delete_failed(each)
    found = await read_commits(store, "", keys)
    for old in found:
        if old.problem is not None:
            _log.warning("the checkpoint that a save replaces is damaged: %s", old.problem)
    return tuple(found)


async def delete_failed(unfinished: UnfinishedSave) -> None:
    """Delete the objects of a save that failed on some rank, unless it was committed after all."""
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
        _log.warning("objects of a failed save are left below %s%s/: %s", store.uri, save_id, exc)


async def finish_save(
    store: Store,
    key: str,
    data: bytes,
    commit: Commit,
    replaces: Sequence[CommitObject],
    *,
    has_leftovers: bool = False,
) -> None:
    """Write the commit object, and delete the objects of the one that it replaced.

    Args:
        store: The store of the checkpoint.
        key: Name of the commit object.
        data: Its bytes.
        commit: The commit in them.
        replaces: The commit objects of the checkpoint when the save began.
        has_leftovers: The save wrote objects that are not in the commit.
    """
    await commit_object(store, key, data, commit, replaces=replaces)
    if not has_leftovers:
        return
    try:
        named = {each.key for each in commit.objects}
        await _delete_unnamed(store, f"{commit.save_id}/", named, "a save")
    except AiofluxError as exc:
        _log.warning("objects are left below %s%s/: %s", store.uri, commit.save_id, exc)


async def _delete_unnamed(store: Store, prefix: str, named: set[str], what: str) -> None:
    listed = await store.list_all(prefix)
    await delete_logged(store, [each for each in listed if each.key not in named], what)
