"""The blocking face of a store under the awaitable names, so that one suite runs through both."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from aioflux import sync
from aioflux.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["BlockingFace"]


class BlockingFace:
    """Awaits each method of `aioflux.sync.Store` over the same store.

    A call blocks the test's own event loop until it is done, as it does for a caller in a notebook.
    """

    def __init__(self, store: Store) -> None:
        self._sync = sync.Store(store)

    async def __aenter__(self) -> Self:
        self._sync.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sync.close()

    async def aclose(self) -> None:
        """Close the store."""
        self._sync.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sync, name)
        model = inspect.getattr_static(Store, name)
        # `put_many` is a plain function that returns an asynchronous generator.
        if inspect.isasyncgenfunction(model) or name == "put_many":
            return _iterating(method)
        if inspect.iscoroutinefunction(model):
            return _awaiting(method)
        return _entering(method) if callable(method) else method


def _awaiting(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **settings: Any) -> Any:
        return method(*args, **settings)

    return call


def _iterating(method: Callable[..., Any]) -> Callable[..., Any]:
    async def iterate(*args: Any, **settings: Any) -> AsyncIterator[Any]:
        iterator = method(*args, **settings)
        try:
            for item in iterator:
                yield item
        finally:
            iterator.close()

    return iterate


def _entering(method: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def enter(*args: Any, **settings: Any) -> AsyncIterator[Any]:
        with method(*args, **settings) as opened:
            yield _BlockingStream(opened)

    return enter


class _BlockingStream:
    """A blocking reader or writer whose `read`, `readinto` and `write` are awaited."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        return _awaiting(attribute) if name in {"read", "readinto", "write"} else attribute
