"""Single flight: callers at the same time share one call of a function."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["SingleFlight"]


class SingleFlight:
    """Calls of one coroutine function, at most one at a time.

    A caller that is cancelled does not cancel the call for the others.
    """

    def __init__(self, function: Callable[[], Awaitable[None]]) -> None:
        self._function = function
        self._task: asyncio.Task[BaseException | None] | None = None

    def start(self) -> bool:
        """Start a call in the background; return False if one is running already."""
        if self._task is not None and not self._task.done():
            return False
        self._task = asyncio.create_task(self._call())
        return True

    async def run(self) -> None:
        """Start a call or join the running one, and raise what it raises."""
        self.start()
        assert self._task is not None
        error = await asyncio.shield(self._task)
        if error is not None:
            raise error

    async def aclose(self) -> None:
        """Cancel the running call."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _call(self) -> BaseException | None:
        try:
            await self._function()
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # a SystemExit raised in a task would end the loop
            return exc
        return None
