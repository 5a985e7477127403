"""Single flight: one call at a time, whose result is shared by all its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Outcome: TypeAlias = "tuple[T | None, BaseException | None]"


class SingleFlight(Generic[T]):
    """One call at a time, shared by concurrent callers.

    While a call is running, other callers wait for it, and all receive its result or its error. A
    cancelled caller does not cancel the call.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Outcome[T]] | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a call is running."""
        return self._task is not None and not self._task.done()

    def start(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        *,
        create_task: Callable[[Any], asyncio.Task[Outcome[T]]] = asyncio.create_task,
    ) -> asyncio.Task[Outcome[T]]:
        """Return the task of the running call, or start a task that calls `function`."""
        if self._task is None or self._task.done():
            self._task = create_task(_outcome(function))
        return self._task

    async def run(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        *,
        create_task: Callable[[Any], asyncio.Task[Outcome[T]]] = asyncio.create_task,
    ) -> T:
        """Call `function`, or wait for the running call, and return the result."""
        result, error = await asyncio.shield(self.start(function, create_task=create_task))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # without an error it is a T

    async def aclose(self) -> None:
        """Cancel the running call."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _outcome(function: Callable[[], Coroutine[Any, Any, T]]) -> Outcome[T]:
    try:
        return await function(), None
    except asyncio.CancelledError:
        raise
    except BaseException as exc:  # a SystemExit raised in a task would stop the event loop
        return None, exc
