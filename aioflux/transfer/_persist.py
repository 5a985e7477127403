"""Work that is done to its end whoever cancels meanwhile: clean-up that would cost money undone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["keep", "see_through", "settle"]

T = TypeVar("T")

_log = logging.getLogger("aioflux")
_running: set[asyncio.Task[Any]] = set()
"""The loop holds its tasks weakly, and these may outlive whoever began them."""


def keep(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that is held until it ends."""
    task = asyncio.create_task(coroutine)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def settle() -> None:
    """Wait until all work of this kind that the running loop has begun is at its end."""
    loop = asyncio.get_running_loop()
    while mine := [task for task in _running if task.get_loop() is loop]:
        await asyncio.wait(mine)


async def see_through(work: Callable[[], Awaitable[object]], *, seconds: float) -> None:
    """Run `work` to its end, within `seconds`, and wait for it.

    It runs in a task of its own. Cancelling the caller ends the wait alone. Where the task itself
    is cancelled, as `asyncio.run` cancels every task there is when it ends and then waits for them
    all, `work` is begun anew: it must be such that this does no harm.

    Raises:
        TimeoutError: The time ran out.
    """
    task = keep(_begin_anew(work, seconds))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_tell)
        raise


async def _begin_anew(work: Callable[[], Awaitable[object]], seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                await work()
            break
        except asyncio.CancelledError as exc:
            cancelled = exc
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
    if cancelled is not None:
        raise cancelled


def _tell(task: asyncio.Task[None]) -> None:
    """Log a failure that nobody waits for any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("clean-up after a cancellation failed: %s", error)
