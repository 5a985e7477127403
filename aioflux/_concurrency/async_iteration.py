"""Asynchronous generators: iteration of one by another, and those of public methods."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import wraps
from typing import Any, Generic, NoReturn, Self, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
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


def rejects_plain_for(method: F) -> F:
    """Decorate a method, so that a plain `for` over its generator says what to use instead."""

    @wraps(method)
    def call(*args: Any, **settings: Any) -> Any:
        return _AsyncItems(method(*args, **settings), method.__qualname__)

    return call  # type: ignore[return-value]


class _AsyncItems:
    """An asynchronous generator with an `__iter__` that raises; `async for` is not slowed down."""

    def __init__(self, generator: Any, name: str) -> None:
        self._name, self._generator = name, generator
        self.asend, self.athrow, self.aclose = generator.asend, generator.athrow, generator.aclose

    def __aiter__(self) -> Any:
        return self._generator

    def __anext__(self) -> Any:
        return self._generator.__anext__()

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} is asynchronous: use `async for`, or a store of aioflux.sync.open_store"
        )
