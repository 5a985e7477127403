"""Iteration of one asynchronous generator by another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

__all__ = ["aclosing_inner"]

T = TypeVar("T")


def _finalize(generator: AsyncGenerator[object, None]) -> None:
    """Do nothing when an inner generator is collected: the outer generator closes it.

    Without a finalizer, Python would close the generator without awaiting, and print an error.
    """


class aclosing_inner(Generic[T]):  # noqa: N801  a context manager like `contextlib.aclosing`
    """`aclosing` for an asynchronous generator that another asynchronous generator iterates.

    When an event loop ends, it closes all generators that are registered with it, at the same time.
    An inner generator would be closed by the loop and by the outer generator at once, which fails
    and prints a traceback. So only the outer generator is registered with the loop.
    """

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator
        self._is_started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
