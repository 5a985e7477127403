"""Work that cancellation must not cut short: clean-up that would cost money undone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["run_to_completion", "start_task", "wait_until_done"]

T = TypeVar("T")

_log = logging.getLogger("aioflux")

_running: set[asyncio.Task[Any]] = set()
"""The loop holds its tasks weakly, and these may outlive their callers."""


def start_task(coroutine: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a task that is referenced, and is one of `tasks`, until it ends."""
    task = asyncio.create_task(coroutine)
    for group in (_running, tasks):
        group.add(task)
        task.add_done_callback(group.discard)
    return task


async def wait_until_done(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `future` is done, and return the last cancellation of the caller meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    return cancelled


async def run_to_completion(
    work: Callable[[], Awaitable[object]],
    tasks: set[asyncio.Task[Any]],
    *,
    seconds: float,
    interrupted_seconds: float,
    wait_seconds: float | None = None,
) -> None:
    """Run `work` to completion in a task of its own, and wait for it.

    Cancelling the caller ends the wait alone. If the task itself is cancelled, as `asyncio.run`
    cancels all tasks when it ends and then waits for them, `work` is run again: it must be
    idempotent.

    Args:
        work: The work.
        tasks: Holds the task while it runs.
        seconds: Time that the work may take.
        interrupted_seconds: Time that it may still take after its task was cancelled.
        wait_seconds: Time to wait for it; all by default. After that it goes on by itself.

    Raises:
        TimeoutError: One of these times ran out.
    """
    task = start_task(_run_anew_if_cancelled(work, seconds, interrupted_seconds), tasks)
    try:
        async with asyncio.timeout(wait_seconds):
            await asyncio.shield(task)
    except (asyncio.CancelledError, TimeoutError):
        if not task.done():
            task.add_done_callback(_log_failure)
        raise


async def _run_anew_if_cancelled(
    work: Callable[[], Awaitable[object]], seconds: float, interrupted_seconds: float
) -> None:
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                await work()
            break
        except asyncio.CancelledError as exc:
            cancelled = exc
            deadline = min(deadline, now() + interrupted_seconds)
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        except Exception as exc:
            if cancelled is None:
                raise
            _warn(exc)  # the end of the loop expects a cancellation alone
            break
    if cancelled is not None:
        raise cancelled


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a failure that no caller waits for."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _warn(error)


def _warn(error: BaseException) -> None:
    _log.warning(
        "clean-up after a cancellation failed, `Store.clean` does it later: %s",
        str(error) or "the service does not answer",
    )
