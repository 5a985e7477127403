"""Event loops in threads of their own, shared by all stores of the process.

    run_on(loop, work), on the loop of the caller
        -> a task on the other loop: work()
        -> its result or error, on the loop of the caller

The threads start when they are first needed, and end with the process. A forked child starts its
own threads, and must neither close nor collect the loops of its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from typing import Any, TypeVar

from aioflux._concurrency.fork_safe_lock import ForkSafeLock
from aioflux._concurrency.run_to_completion import wait_until_done

T = TypeVar("T")

_STOP_SECONDS = 2.0
"""Longest wait for the thread of a loop at the end of the process."""


_lock = ForkSafeLock()
_by_pid: dict[int, list[tuple[asyncio.AbstractEventLoop, threading.Thread]]] = {}
"""Loops and threads by process. A forked child must never close or collect those of its parent."""
_first_pid = os.getpid()


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of uvloop; of asyncio if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, and restart it after a SystemExit or KeyboardInterrupt.

    Code of the caller, such as a credentials function, can raise them in a task. asyncio raises
    them both in the code that awaits the task and from `run_forever`.
    """
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            return


def loop_threads(count: int) -> list[asyncio.AbstractEventLoop]:
    """Return this number of running event loops; all stores of the process share them."""
    with _lock.current:
        loops = _by_pid.setdefault(os.getpid(), [])
        while len(loops) < count:
            loop = new_loop()
            name = f"aioflux-loop-{len(loops) + 2}"
            thread = threading.Thread(
                target=run_until_stopped, args=(loop,), name=name, daemon=True
            )
            thread.start()
            loops.append((loop, thread))
        return [loop for loop, _ in loops[:count]]


async def run_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on another loop, and return its result.

    If the caller is cancelled, the coroutine is cancelled, too. This returns only when the
    coroutine is done, because the coroutine may write to memory of the caller.
    """
    home = asyncio.get_running_loop()
    done: asyncio.Future[asyncio.Task[T]] = home.create_future()
    started: list[asyncio.Task[T]] = []

    async def run() -> T:
        return await work()  # in the task, so that it has the errors of the call, too

    def start() -> None:
        started.append(loop.create_task(run()))
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
    """Stop all loops, at the end of the process, after the stores of the bridge are closed."""
    for loop, thread in _by_pid.pop(os.getpid(), ()):
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_SECONDS)
        if not thread.is_alive():
            loop.close()


def _replace_lookup_threads() -> None:
    """Start the threads of libuv for name lookups again, at the end of a forked child.

    libuv joins them at exit. Without those of its parent the child would end with SIGSEGV.
    """
    if os.getpid() != _first_pid and "uvloop" in sys.modules:
        with suppress(Exception):  # the process may have no descriptor or memory left
            loop = new_loop()
            with closing(loop):
                # Without a socket type, uvloop does not parse the address itself.
                loop.run_until_complete(loop.getaddrinfo("127.0.0.1", 0))


atexit.register(_replace_lookup_threads)
atexit.register(_stop)
