"""Blocking methods of an fsspec filesystem, over the bridge in place of fsspec's own thread.

fsspec's `sync` does not cancel a coroutine when Ctrl-C ends the wait for it, and its thread does
not run in a forked child. The bridge cancels the coroutine, and
starts a new thread in the child.
"""

from __future__ import annotations

from functools import wraps
from inspect import isasyncgenfunction
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fsspec.asyn import sync  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from aioflux import _bridge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

__all__ = ["BLOCKING_METHODS", "add_blocking_methods", "run_blocking"]

T = TypeVar("T")

BLOCKING_METHODS: Final = (
    *("info", "ls", "find", "walk", "glob", "expand_path", "du", "size", "sizes"),
    *("exists", "isdir", "isfile", "created", "modified"),
    *("cat", "cat_file", "cat_ranges", "head", "tail", "get", "get_file"),
    *("pipe", "pipe_file", "put", "put_file", "touch", "mkdir", "makedirs"),
    *("copy", "cp_file", "mv", "mv_file", "rm", "rm_file"),
)
"""Methods that run the coroutine function of their name with an underscore before it."""


def run_blocking(fs: Any, function: Callable[..., Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function for a blocking caller, on the loop that the filesystem was given."""
    if fs.own_loop is not None:
        result: T = sync(fs.own_loop, function)
        return result
    return _bridge.run(function())


def add_blocking_methods(cls: type[T]) -> type[T]:
    for name in BLOCKING_METHODS:
        function = getattr(cls, f"_{name}")
        make = _blocking_iterator if isasyncgenfunction(function) else _blocking_call
        documented = getattr(AbstractFileSystem, name, None) or function
        setattr(cls, name, wraps(documented)(make(f"_{name}")))
    return cls


def _blocking_call(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        async def work() -> Any:
            return await getattr(self, name)(*args, **kwargs)

        return run_blocking(self, work)

    return call


def _blocking_iterator(name: str) -> Callable[..., Iterator[Any]]:
    def iterate(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items: AsyncGenerator[Any, None] = getattr(self, name)(*args, **kwargs)
        if self.own_loop is None:
            return _bridge.iterate(items)
        return _iterate_on_own_loop(self, items)

    return iterate


def _iterate_on_own_loop(fs: Any, items: AsyncGenerator[T, None]) -> Iterator[T]:
    async def step() -> list[T]:
        # StopAsyncIteration cannot pass through a future as it is.
        try:
            return [await anext(items)]
        except StopAsyncIteration:
            return []

    while found := run_blocking(fs, step):
        yield found[0]
