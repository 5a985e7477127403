"""Iteration of one asynchronous generator by another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable
    from types import TracebackType

__all__ = ["nested"]

T = TypeVar("T")


def _finalize(generator: AsyncGenerator[object, None]) -> None:
    """Do nothing with an inner generator that is collected: the outer one closes it.

    Without a finalizer Python would end it without awaiting anything, and print that.
    """


class nested(Generic[T]):  # noqa: N801  a context manager like `contextlib.aclosing`
    """`aclosing` for an asynchronous generator that another one iterates.

    A loop that ends closes all generators that it knows of at once. The inner one would then be
    closed twice, by the loop and by the outer one, which fails and prints a traceback. So only the
    outer one is registered with the loop.
    """

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator
        self._is_started = False

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
        if self._is_started:
            return self._generator.__anext__()
        self._is_started = True
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_finalize)
        try:
            return self._generator.__anext__()
        finally:
            sys.set_asyncgen_hooks(firstiter=hooks.firstiter, finalizer=hooks.finalizer)
