r"""Event loops in threads of their own, shared by all stores of the process.

    home loop:    await run_on(loop, work) ------------------> result, or error
                                           \                /
    loop's thread:                          task: work() --

The threads start when they are first needed, and end with the process. A forked child starts its
own threads, and must neither close nor collect the loops of its parent (see `aioflux._bridge`).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from aioflux._concurrency.run_to_completion import wait_until_done

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["loop_threads", "new_loop", "run_on"]

T = TypeVar("T")

_STOP_SECONDS = 2.0
"""Longest wait for the thread of a loop at the end of the process."""

_loops: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
_lock = threading.Lock()


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of uvloop; of asyncio if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def loop_threads(count: int) -> list[asyncio.AbstractEventLoop]:
    """Return this number of running event loops; all stores share them."""
    with _lock:
        while len(_loops) < count:
            loop = new_loop()
            name = f"aioflux-loop-{len(_loops) + 2}"
            thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
            thread.start()
            _loops.append((loop, thread))
        return [loop for loop, _ in _loops[:count]]


async def run_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on another loop, and return its result.

    If the caller is cancelled, the coroutine is cancelled, too. This returns only when the
    coroutine is done, because the coroutine may write to memory of the caller.
    """
    home = asyncio.get_running_loop()
    done: asyncio.Future[asyncio.Task[T]] = home.create_future()
    started: list[asyncio.Task[T]] = []

    def start() -> None:
        started.append(loop.create_task(work()))
        started[0].add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        with suppress(RuntimeError):  # the home loop was closed without waiting for its tasks
            home.call_soon_threadsafe(done.set_result, task)

    loop.call_soon_threadsafe(start)
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        # `start` runs before this, because a loop runs its callbacks in order.
        loop.call_soon_threadsafe(lambda: started[0].cancel())
        await wait_until_done(done)
        _ = done.result().cancelled() or done.result().exception()  # or asyncio logs it
        raise
    return done.result().result()


def _stop() -> None:
    while _loops:
        loop, thread = _loops.pop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_SECONDS)
        if not thread.is_alive():
            loop.close()


def _after_fork_in_child() -> None:
    global _loops, _lock
    if sys.implementation.name == "cpython":
        # A reference that is never released, so that the parent's loops are never collected.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_loops))
    _loops, _lock = [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_stop)
