"""Blocking work on files, in a thread, that ends soon after a cancellation."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BLOCK_BYTES", "Stop", "in_thread"]

T = TypeVar("T")

BLOCK_BYTES = 16 * 1024 * 1024
"""Bytes between two checks for a cancellation: 2 to 10 ms."""


class Stop:
    """A flag by which the event loop ends work in a thread."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Make the next `check` raise; from any thread."""
        self._is_set = True

    def check(self) -> None:
        """Raise InterruptedError if the work was cancelled."""
        if self._is_set:
            raise InterruptedError(errno.EINTR, "cancelled")


async def in_thread(work: Callable[[Stop], T], *, into_callers_memory: bool = False) -> T:
    """Run blocking work in a thread; cancelled, it ends at its next `Stop.check`.

    Args:
        work: Called with the `Stop`, which it checks now and then.
        into_callers_memory: A cancellation waits for the end, since the memory is the caller's.
    """
    stop = Stop()
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work, stop)
    except RuntimeError:
        return work(stop)  # the interpreter is ending and starts no more threads
    try:
        return await (asyncio.shield(future) if into_callers_memory else future)
    except asyncio.CancelledError:
        stop.set()
        while into_callers_memory and not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if into_callers_memory and not future.cancelled():
            future.exception()  # seen, so that the loop does not report it
        raise
