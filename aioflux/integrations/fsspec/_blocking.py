"""The blocking face of an fsspec filesystem, over the bridge instead of fsspec's own thread.

fsspec's `sync` leaves what it started running when Ctrl-C ends the wait for it, and its thread is
gone in a forked child. The bridge cancels, and starts anew.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.asyn import sync  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from aioflux import _bridge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

__all__ = ["blocking", "wait_for"]

T = TypeVar("T")


def wait_for(system: Any, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function for a blocking caller, on the loop that a filesystem was given."""
    if system.own_loop is not None:
        result: T = sync(system.own_loop, function, *args)
        return result
    return _bridge.run(function(*args))


def blocking(*also: str) -> Callable[[type[T]], type[T]]:
    """Give a class a method `x` for each coroutine `_x` that fsspec knows a blocking `x` of.

    Args:
        also: Names of further ones.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name in dir(cls):
            face = name[1:]
            if not name.startswith("_") or face.startswith("_"):
                continue
            default = getattr(AbstractFileSystem, face, None)
            is_open = default is not None and getattr(cls, face, None) is default
            if not (is_open or face in also):
                continue
            function = getattr(cls, name)
            if inspect.iscoroutinefunction(function):
                setattr(cls, face, _call(function, default))
            elif inspect.isasyncgenfunction(function):
                setattr(cls, face, _iteration(function, default))
        return cls

    return decorate


def _call(function: Callable[..., Any], default: Any) -> Callable[..., Any]:
    name = function.__name__

    @wraps(default or function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        async def work() -> Any:
            return await getattr(self, name)(*args, **kwargs)

        return wait_for(self, work)

    return call


def _iteration(function: Callable[..., Any], default: Any) -> Callable[..., Iterator[Any]]:
    name = function.__name__

    @wraps(default or function)
    def iterate(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items: AsyncGenerator[Any, None] = getattr(self, name)(*args, **kwargs)
        if self.own_loop is None:
            return _bridge.iterate(items)
        return _foreign(self, items)

    return iterate


def _foreign(system: Any, items: AsyncGenerator[T, None]) -> Iterator[T]:
    async def step() -> tuple[bool, T | None]:
        # StopAsyncIteration cannot pass through a future as it is.
        try:
            return True, await anext(items)
        except StopAsyncIteration:
            return False, None

    while True:
        there_is, item = wait_for(system, step)
        if not there_is:
            return
        yield item  # type: ignore[misc]  # an item where there is one
