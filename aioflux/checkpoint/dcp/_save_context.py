"""Turn: what a writer knows of one save, kept by the thread that saves.

`async_save` runs each save on a thread of its own, and nothing keeps two of one writer from running
at once. DCP calls a writer several times for each save and does not say for which; but a thread has
one at a time, and its context goes with it.
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

__all__ = ["Turn", "begin_turn", "run", "turn_of"]

T = TypeVar("T")


@dataclass(eq=False)
class Turn:
    """One save."""

    store: Store
    """Where it goes."""
    rank: int | None = None
    """The rank that DCP told, or None where it told none."""
    is_collective: bool = True
    """All ranks make one checkpoint."""
    commits: bool = False
    """This rank writes the commit object."""
    save_id: str = ""
    """Name of the save, once it is known."""
    seen: tuple[CommitObject, ...] = ()
    """Commit objects that there were when it began."""
    is_begun: bool = False
    """It was set up."""
    is_over: bool = False
    """It succeeded, or its thread went on to another."""


_turns: ContextVar[WeakKeyDictionary[object, Turn] | None] = ContextVar(
    "aioflux_turns", default=None
)


def turn_of(writer: object) -> Turn | None:
    """Return the save that this thread is at with a writer, or was at last."""
    turns = _turns.get()
    return None if turns is None else turns.get(writer)


def begin_turn(writer: object, turn: Turn) -> None:
    """Begin another save in this thread; the one before it is over."""
    turns = WeakKeyDictionary(_turns.get() or {})
    if (last := turns.get(writer)) is not None:
        last.is_over = True
    turns[writer] = turn
    _turns.set(turns)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop, which keeps nothing of this thread's context."""
    return Context().run(_bridge.run, coroutine)
