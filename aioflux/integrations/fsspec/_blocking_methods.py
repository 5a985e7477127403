"""Blocking methods of an fsspec filesystem, run by `aioflux._bridge` and not by fsspec's thread.

When Ctrl-C interrupts fsspec's `sync`, the coroutine continues to run, and fsspec's thread does not
exist in a forked child. The bridge cancels the coroutine, and starts a new thread in the child.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from inspect import isasyncgenfunction
from typing import Any, Final, TypeVar

from fsspec.asyn import sync  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from aioflux import _bridge

T = TypeVar("T")

BLOCKING_METHODS: Final = (
    *("info", "ls", "find", "walk", "glob", "expand_path", "du", "size", "sizes"),
    *("exists", "isdir", "isfile", "created", "modified", "sign"),
    *("cat", "cat_file", "cat_ranges", "head", "tail", "get", "get_file"),
    *("pipe", "pipe_file", "put", "put_file", "touch", "mkdir", "makedirs"),
    *("copy", "cp_file", "mv", "mv_file", "rm", "rm_file"),
)
"""Blocking methods to add. Each runs the coroutine function of the same name with a leading "_"."""


def run_blocking(fs: Any, function: Callable[..., Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function, on the filesystem's `own_loop` if set, and return its result."""
    if fs.own_loop is not None:
        result: T = sync(fs.own_loop, function)
        return result
    return _bridge.run(function())


def add_blocking_methods(cls: type[T]) -> type[T]:
    for name in BLOCKING_METHODS:
        function = getattr(cls, f"_{name}")
        make_method = _blocking_iterator if isasyncgenfunction(function) else _blocking_call
        documented = getattr(AbstractFileSystem, name, None) or function
        setattr(cls, name, wraps(documented)(make_method(f"_{name}")))
    return cls


def _blocking_call(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        async def run_method() -> Any:
            return await getattr(self, name)(*args, **kwargs)

        return run_blocking(self, run_method)

    return call


def _blocking_iterator(name: str) -> Callable[..., Iterator[Any]]:
    def iterate(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items: AsyncGenerator[Any, None] = getattr(self, name)(*args, **kwargs)
        if self.own_loop is None:
            return _bridge.iterate(items)
        return _iterate_on_own_loop(self, items)

    return iterate


def _iterate_on_own_loop(fs: Any, items: AsyncGenerator[T, None]) -> Iterator[T]:
    async def next_item() -> list[T]:
        # A list: an empty one means the end, because None could be an item.
        try:
            return [await anext(items)]
        except StopAsyncIteration:
            return []

    while item := run_blocking(fs, next_item):
        yield item[0]
