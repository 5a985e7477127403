"""Blocking file operations in threads, which stop soon after a cancellation."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

BLOCK_BYTES = 16 * 1024 * 1024
"""Largest number of bytes read or written between two calls of `Stop.check`: 2 to 10 ms."""


class Stop:
    """Flag that the event loop sets to stop work in a thread."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Make the next `check` raise; may be called from any thread."""
        self._is_set = True

    def check(self) -> None:
        """Raise InterruptedError if the work was cancelled."""
        if self._is_set:
            raise InterruptedError(errno.EINTR, "cancelled")


async def in_thread(work: Callable[[Stop], T], *, into_callers_memory: bool = False) -> T:
    """Run blocking work in a thread; after a cancellation it stops at its next `Stop.check`.

    Args:
        work: Called with a `Stop`, which it must check regularly.
        into_callers_memory: The work writes into memory of the caller, so that a cancellation waits
            until the work has stopped.
    """
    stop = Stop()
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work, stop)
    except RuntimeError:
        return work(stop)  # at interpreter exit, no new thread can be started
    try:
        return await (asyncio.shield(future) if into_callers_memory else future)
    except asyncio.CancelledError:
        stop.set()
        while into_callers_memory and not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if into_callers_memory and not future.cancelled():
            future.exception()  # retrieve it, so that the loop does not log it
        raise
