"""Saves of a `StorageWriter`: the context of each save, and its first and last operation.

DCP calls several methods of a writer during one save, and does not pass the save to them.
`async_save` runs each save on a thread of its own, so two saves of one writer may run at the same
time. But each thread runs one save at a time, so a context variable finds the current save.

begin_save      reads the existing commit objects (`_store/steps`)
delete_failed   deletes objects of failed saves
finish_save     writes the commit object, and deletes the objects of the commit that it replaced
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Coroutine, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aioflux import _bridge
from aioflux.checkpoint._store.steps import commit_save, delete_logged, read_commits
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store

T = TypeVar("T")

_log = logging.getLogger("aioflux")


@dataclass(eq=False)
class SaveContext:
    """The facts about one save, between the calls of DCP."""

    store: Store
    rank: int | None = None
    """The rank that DCP passed to the writer; None if DCP passed none."""
    is_collective: bool = True
    """All ranks save one checkpoint. False: each rank saves its own (`use_collectives=False`)."""
    is_committer: bool = False
    """This rank writes the commit object."""
    save_id: str = ""
    """Empty before the plan is known."""
    replaces: tuple[CommitObject, ...] = ()
    """Commit objects that the checkpoint had when the save began."""
    is_set_up: bool = False
    """DCP has called `set_up_storage_writer`."""
    is_over: bool = False
    """The save was committed, or its thread started another save."""


_contexts: ContextVar[weakref.WeakKeyDictionary[object, SaveContext] | None] = ContextVar(
    "aioflux_saves", default=None
)


def context_of(writer: object) -> SaveContext | None:
    """Return the context of the writer's last save in this thread."""
    contexts = _contexts.get()
    return None if contexts is None else contexts.get(writer)


def start_save(writer: object, context: SaveContext) -> None:
    """Set the context of the writer in this thread. The previous save of the thread is over."""
    contexts = weakref.WeakKeyDictionary(_contexts.get() or {})
    if (last := contexts.get(writer)) is not None:
        last.is_over = True
    contexts[writer] = context
    _contexts.set(contexts)


def run_without_context(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop in an empty context.

    The loop keeps references to the contexts of its callers, and so would keep the save.
    """
    return Context().run(_bridge.run, coroutine)


class UnfinishedSave(NamedTuple):
    """A save that was started and not committed."""

    store: Store
    keys: Sequence[str]
    save_id: str
    context: weakref.ref[SaveContext]

    @property
    def is_over(self) -> bool:
        """Return whether the save has failed or was committed."""
        context = self.context()
        return context is None or context.is_over


async def delete_failed(unfinished: UnfinishedSave) -> None:
    """Delete the objects of a save that failed on a rank, unless the save was committed."""
    store, save_id = unfinished.store, unfinished.save_id
    try:
        commits = await read_commits(store, "", unfinished.keys)
        if any(old.problem is not None for old in commits):
            return  # the objects of the damaged commit are unknown
        # With a cached plan each rank derives the save id from its number of earlier saves (see
        # `RankPlacement.use`). If these numbers differ, the commit of another save may list objects
        # with this save id.
        decoded = [old.commit for old in commits if old.commit is not None]
        if any(commit.save_id == save_id for commit in decoded):
            return
        committed = {stored.key for commit in decoded for stored in commit.objects}
        for prefix in (f"{save_id}/", f"model-{save_id}-"):
            await _delete_uncommitted(store, prefix, committed, "a save that failed")
    except AiofluxError as exc:
        _log.warning("could not delete a failed save below %s%s/: %s", store.uri, save_id, exc)


async def finish_save(
    store: Store,
    key: str,
    data: bytes,
    commit: Commit,
    replaces: Sequence[CommitObject],
    *,
    has_leftovers: bool = False,
) -> None:
    """Commit a save, and delete the objects of the commit that it replaced.

    `replaces` is the result of `begin_save`. If `has_leftovers` is True, the save uploaded objects
    that its commit does not list, such as parts of tensors; delete them, too.
    """
    await commit_save(store, key, data, commit, replaces=replaces)
    if not has_leftovers:
        return
    try:
        committed = {stored.key for stored in commit.objects}
        await _delete_uncommitted(store, f"{commit.save_id}/", committed, "leftovers of a save")
    except AiofluxError as exc:
        _log.warning("could not delete leftovers below %s%s/: %s", store.uri, commit.save_id, exc)


async def _delete_uncommitted(store: Store, prefix: str, committed: set[str], label: str) -> None:
    listed = await store.list_all(prefix)
    orphans = [meta for meta in listed if meta.key not in committed]
    await delete_logged(store, orphans, label)
