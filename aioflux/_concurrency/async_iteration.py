"""A generator within a generator, closed in order also where the loop ends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable
    from types import TracebackType

__all__ = ["nested"]

T = TypeVar("T")


def _leave(generator: AsyncGenerator[object, None]) -> None:
    """Do nothing with an inner generator that is collected: the outer one closes it.

    The loop knows the outer one. Without a finalizer Python would end the inner one by itself,
    where it cannot await anything, and print that.
    """


class nested(Generic[T]):  # noqa: N801  a context manager like `contextlib.aclosing`
    """`aclosing` for an asynchronous generator that another one iterates.

    A loop that ends closes all generators that it knows of at once. The inner one would then be
    closed twice, by the loop and by the outer one, which fails and prints a traceback: so the loop
    is told of the outer one alone.
    """

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator
        self._is_begun = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._generator.aclose()

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        if self._is_begun:
            return self._generator.__anext__()
        self._is_begun = True
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_leave)
        try:
            return self._generator.__anext__()
        finally:
            sys.set_asyncgen_hooks(firstiter=hooks.firstiter, finalizer=hooks.finalizer)
