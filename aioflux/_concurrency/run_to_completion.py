"""Work that continues when its caller is cancelled, such as the clean-up of stored bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

T = TypeVar("T")

_log = logging.getLogger("aioflux")

_running: set[asyncio.Task[Any]] = set()
"""Strong references to tasks: event loops have only weak ones, and tasks may outlive callers."""


def start_task(coroutine: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a task that stays referenced, and a member of `tasks`, until it is done."""
    task = asyncio.create_task(coroutine)
    for group in (_running, tasks):
        group.add(task)
        task.add_done_callback(group.discard)
    return task


async def wait_until_done(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `future` is done, even if cancelled; return the last cancellation, or None."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    return cancelled


async def run_in_thread(
    function: Callable[..., T],
    *arguments: Any,
    executor: Executor | None = None,
    on_cancel: Callable[[], object] = bool,
) -> T:
    """Call a function in a thread. A cancelled call still waits until the function returns.

    `executor` is by default that of the event loop. A cancellation first calls `on_cancel`.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, partial(function, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        on_cancel()
        await wait_until_done(future)
        with suppress(Exception):  # marks the exception as retrieved
            future.exception()
        raise


async def run_to_completion(
    work: Callable[[], Awaitable[object]],
    tasks: set[asyncio.Task[Any]],
    *,
    seconds: float,
    interrupted_seconds: float,
    wait_seconds: float | None = None,
) -> None:
    """Run `work` to completion in a task of its own, and wait for it.

    If the caller is cancelled, only its wait ends. If the task itself is cancelled, `work` is run
    again, because `asyncio.run` cancels all tasks before it returns, and waits for them.

    Args:
        work: The work; it must be idempotent.
        tasks: Set that contains the task while it runs.
        seconds: Time limit of the work.
        interrupted_seconds: Time limit of the work after its task was cancelled.
        wait_seconds: Longest time to wait for the work, which then continues in the background; by
            default until it is done.

    Raises:
        TimeoutError: The time for the work, or for the wait, has passed. After the time for the
            wait the work continues.
    """
    task = start_task(_rerun_if_cancelled(work, seconds, interrupted_seconds), tasks)
    try:
        async with asyncio.timeout(wait_seconds):
            await asyncio.shield(task)
    except (asyncio.CancelledError, TimeoutError):
        if not task.done():
            task.add_done_callback(_log_failure)
        raise


async def _rerun_if_cancelled(
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
            _warn(exc)  # not raised: `asyncio.run` prints every exception but a cancellation
            break
    if cancelled is not None:
        raise cancelled


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a failure of a task whose caller no longer waits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _warn(error)


def _warn(error: BaseException) -> None:
    _log.warning(
        "clean-up in the background failed; call `Store.clean` later to delete the rest: %s",
        str(error) or "no response from the service",
    )
