"""Opening connections to their end, also those that nobody waits for any more.

asyncio leaves a TLS handshake behind that is cancelled: closing its transport does nothing before
the handshake has begun and waits for the peer after it, and the socket stays open with nobody to
close it. So the opening is never cancelled with its caller; what comes of it is closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Openings"]

T = TypeVar("T")


class Openings:
    """The connections of one pool that are being opened."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, opening: Coroutine[Any, Any, T], close: Callable[[T], object]) -> T:
        """Open a connection; where the caller is cancelled meanwhile, close it as soon as it is.

        Args:
            opening: Opens it, within a time of its own.
            close: Closes it.
        """
        task = asyncio.create_task(opening)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:

            def drop(done: asyncio.Task[T]) -> None:
                if not done.cancelled() and done.exception() is None:
                    close(done.result())

            task.add_done_callback(drop)
            raise

    async def settle(self, *, seconds: float) -> None:
        """Wait until none is being opened, `seconds` at most; then cancel those that still are."""
        if not self._tasks:
            return
        _, left = await asyncio.wait(tuple(self._tasks), timeout=seconds)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
