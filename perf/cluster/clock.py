"""An asyncio event loop on a virtual clock, which jumps to the next timer when it is idle."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["VirtualLoop", "run"]

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """A selector that moves the clock forward instead of waiting. No file is ever ready."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError(
                "the simulation has no timer and nothing to run: a coroutine waits for a thread, a "
                "socket, or a future that nothing completes"
            )
        if timeout > 0:
            self._advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual and starts at 0. It has no threads and no sockets."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._advance))
        # Sums of floats differ from the time of the timer by rounding; a timer within this time
        # counts as due.
        self._clock_resolution = 1e-9

    def _advance(self, seconds: float) -> None:
        self._now += seconds

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now

    def run_in_executor(self, *_: Any) -> NoReturn:  # type: ignore[override]
        """Raise RuntimeError: the time that a thread takes is not simulated."""
        raise RuntimeError("code in the simulation started a thread")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new virtual loop; cancel the tasks that are left, and close the loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_without_executor(main))


async def _without_executor(main: Coroutine[Any, Any, T]) -> T:
    try:
        return await main
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=600)
