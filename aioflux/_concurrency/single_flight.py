"""One call at a time, shared by all callers that need its result."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["SingleFlight"]

T = TypeVar("T")
Outcome: TypeAlias = "tuple[T | None, BaseException | None]"


class SingleFlight(Generic[T]):
    """Calls of which one is under way at a time.

    A caller joins the call that is under way, if there is one; all get its result or its error. A
    cancelled caller does not end it.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Outcome[T]] | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a call is under way."""
        return self._task is not None and not self._task.done()

    def start(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        *,
        create_task: Callable[[Any], asyncio.Task[Outcome[T]]] = asyncio.create_task,
    ) -> asyncio.Task[Outcome[T]]:
        """Call `function` in a task, unless a call is under way; return that."""
        if self._task is None or self._task.done():
            self._task = create_task(_outcome(function))
        return self._task

    async def run(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        *,
        create_task: Callable[[Any], asyncio.Task[Outcome[T]]] = asyncio.create_task,
    ) -> T:
        """Call `function`, or join the call that is under way; raise what it raises."""
        result, error = await asyncio.shield(self.start(function, create_task=create_task))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # without an error it is a T

    async def aclose(self) -> None:
        """Cancel the call that is under way."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _outcome(function: Callable[[], Coroutine[Any, Any, T]]) -> Outcome[T]:
    try:
        return await function(), None
    except asyncio.CancelledError:
        raise
    except BaseException as exc:  # a SystemExit raised in a task would end the loop
        return None, exc
