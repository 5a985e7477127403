"""The context of one save of a writer, kept by the thread that saves; its begin and its end.

`async_save` runs each save on a thread of its own, and two saves of one writer may run at once. DCP
calls a writer several times for each save without naming the save; but a thread runs one at a time,
so that the save is found by the thread's context variables.

begin_save    deletes objects of failed saves, and reads the existing commit objects
finish_save   replaces the commit object that was read, if any, and deletes its objects
"""

from __future__ import annotations

import logging
import weakref
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aioflux import _bridge
from aioflux.checkpoint._store.commit import commit as commit_object
from aioflux.checkpoint._store.commit import delete_logged
from aioflux.checkpoint._store.commits import read_commits
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = [
    "SaveContext",
    "UnfinishedSave",
    "begin_save",
    "context_of",
    "delete_failed",
    "finish_save",
    "run_without_context",
    "start_save",
]

T = TypeVar("T")

_log = logging.getLogger("aioflux")


@dataclass(eq=False)
class SaveContext:
    """One save."""

    store: Store
    """The store of the checkpoint."""
    rank: int | None = None
    """The rank that DCP passed, or None."""
    is_collective: bool = True
    """All ranks write one checkpoint."""
    is_committer: bool = False
    """This rank writes the commit object."""
    save_id: str = ""
    """Name of the save, once it is known."""
    replaces: tuple[CommitObject, ...] = ()
    """Commit objects of the checkpoint when the save began."""
    is_set_up: bool = False
    """DCP has set the writer up for it."""
    is_over: bool = False
    """It succeeded, or its thread went on to another save."""


_contexts: ContextVar[weakref.WeakKeyDictionary[object, SaveContext] | None] = ContextVar(
    "aioflux_saves", default=None
)


def context_of(writer: object) -> SaveContext | None:
    """Return the context of the writer's last save in this thread."""
    contexts = _contexts.get()
    return None if contexts is None else contexts.get(writer)


def start_save(writer: object, context: SaveContext) -> None:
    """Set the context of the writer in this thread; the save before is over."""
    contexts = weakref.WeakKeyDictionary(_contexts.get() or {})
    if (last := contexts.get(writer)) is not None:
        last.is_over = True
    contexts[writer] = context
    _contexts.set(contexts)


def run_without_context(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop, which would keep a reference to this context."""
    return Context().run(_bridge.run, coroutine)


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
    """Commit as `aioflux.checkpoint._store.commit` does.

    If the save has leftovers, which are objects that are not in the commit, these are deleted, too.
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
