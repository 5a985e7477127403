"""Work that is done to its end whoever cancels meanwhile: clean-up that would cost money undone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["keep", "see_through"]

T = TypeVar("T")

_log = logging.getLogger("aioflux")
_FAILED = "clean-up after a cancellation failed, `Store.clean` does it later"

_LAST_SECONDS = 2.0
"""Time for work that the end of its loop has cancelled: a Ctrl-C is not to hang on a service that
no longer answers."""

_running: set[asyncio.Task[Any]] = set()
"""The loop holds its tasks weakly, and these may outlive whoever began them."""


def keep(coroutine: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a task that is held, and is one of `tasks`, until it ends."""
    task = asyncio.create_task(coroutine)
    for group in (_running, tasks):
        group.add(task)
        task.add_done_callback(group.discard)
    return task


async def see_through(
    work: Callable[[], Awaitable[object]],
    tasks: set[asyncio.Task[Any]],
    *,
    seconds: float,
    wait_seconds: float | None = None,
) -> None:
    """Run `work` to its end, within `seconds`, and wait for it.

    It runs in a task of its own. Cancelling the caller ends the wait alone. Where the task itself
    is cancelled, as `asyncio.run` cancels every task there is when it ends and then waits for them
    all, `work` is begun anew, for two seconds more: it must be such that this does no harm.

    Args:
        work: What to do.
        tasks: Takes the task while it runs.
        seconds: Time that the work may take.
        wait_seconds: Time to wait for it; all by default. After that it goes on by itself.

    Raises:
        TimeoutError: One of these times ran out.
    """
    task = keep(_begin_anew(work, seconds), tasks)
    try:
        async with asyncio.timeout(wait_seconds):
            await asyncio.shield(task)
    except (asyncio.CancelledError, TimeoutError):
        if not task.done():
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
            deadline = min(deadline, asyncio.get_running_loop().time() + _LAST_SECONDS)
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        except Exception as exc:
            if cancelled is None:
                raise
            # Whoever cancelled expects nothing else to be raised.
            _log.warning("%s: %s", _FAILED, str(exc) or "the service does not answer")
            break
    if cancelled is not None:
        raise cancelled


def _tell(task: asyncio.Task[None]) -> None:
    """Log a failure that nobody waits for any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s: %s", _FAILED, str(error) or "the service does not answer")
