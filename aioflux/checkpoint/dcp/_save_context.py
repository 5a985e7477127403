"""The context of one save of a writer, kept by the thread that saves.

`async_save` runs each save on a thread of its own, and two saves of one writer may run at once. DCP
calls a writer several times for each save without naming the save; but a thread runs one at a time,
so that the save is found by the thread's context variables.
"""

from __future__ import annotations

from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from aioflux import _bridge

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = ["SaveContext", "context_of", "run_without_context", "start_save"]

T = TypeVar("T")


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


_contexts: ContextVar[WeakKeyDictionary[object, SaveContext] | None] = ContextVar(
    "aioflux_saves", default=None
)


def context_of(writer: object) -> SaveContext | None:
    """Return the context of the writer's last save in this thread."""
    contexts = _contexts.get()
    return None if contexts is None else contexts.get(writer)


def start_save(writer: object, context: SaveContext) -> None:
    """Set the context of the writer in this thread; the save before is over."""
    contexts = WeakKeyDictionary(_contexts.get() or {})
    if (last := contexts.get(writer)) is not None:
        last.is_over = True
    contexts[writer] = context
    _contexts.set(contexts)


def run_without_context(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop, which would keep a reference to this context."""
    return Context().run(_bridge.run, coroutine)
