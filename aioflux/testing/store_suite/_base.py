"""Base of the suite: hooks of a subclass, and the store under test."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import pytest
import pytest_asyncio

from aioflux import sync
from aioflux.options import MIB, TransferOptions
from aioflux.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["KIB", "OPTIONS", "PART", "SuiteBase", "SuiteCapabilities", "drain", "pattern"]

T = TypeVar("T")

# Pytest shows the values of failing assertions. It has to know the modules before their import, of
# which this one is the first.
_PARTS = ("keys", "list", "many", "read", "server_side", "streams", "write")
pytest.register_assert_rewrite(*(f"aioflux.testing.store_suite._{part}" for part in _PARTS))

KIB = 1024
PART = 5 * MIB
"""Smallest part that services accept."""

_PERIOD = 1_000_003
"""`pattern` repeats after so many bytes, of which no range or part is a multiple."""

OPTIONS = TransferOptions(
    max_in_flight=8,
    range_size_bytes=64 * KIB,
    part_size_bytes=PART,
    max_buffered_bytes=2 * PART,
)
"""Options so small that a few small objects reach every limit."""


async def drain(items: AsyncIterator[T], into: list[T]) -> None:
    """Append items until there are no more, or the iterator fails."""
    async for item in items:
        into.append(item)  # noqa: PERF401  items before a failure are kept


def pattern(size: int, *, seed: int = 0) -> bytes:
    """Return bytes that differ by position and by seed."""
    block = random.Random(seed).randbytes(min(size, _PERIOD))  # noqa: S311  not a secret
    return (block * (size // _PERIOD + 1))[:size]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteCapabilities:
    """Capabilities of the service under test; tests of others are skipped."""

    keeps_metadata: bool = True
    """Content type and the user's metadata come back from `head`."""
    has_checksums: bool = True
    """`ObjectMeta.crc32c` is known."""
    takes_any_key: bool = True
    """Keys may have empty segments, dots, trailing slashes and segments of 1024 bytes."""
    takes_dots: bool = True
    """Segments may be `.` and `..`, and may end with a dot."""
    takes_backslashes: bool = True
    """Keys may have backslashes."""
    composes: bool = True
    """The service can concatenate objects; else `compose` raises UnsupportedError."""
    keeps_uploads_apart: bool = True
    """Two uploads of one key may be open, and the last to complete wins; else the first wins, and
    the other one fails."""
    max_compose_sources: int = 32
    """Sources of one compose."""
    page_size: int = 5000
    """Most objects in one page of a listing."""


class SuiteBase(ABC):
    """Hooks and fixtures.

    Attributes:
        face: The API under test: `aioflux.Store` or, with "sync", `aioflux.sync.Store`.
        can: Capabilities of the service.
    """

    face: ClassVar[Literal["async", "sync"]] = "async"
    can: ClassVar[SuiteCapabilities] = SuiteCapabilities()

    @abstractmethod
    def open_store(self, *, transfer: TransferOptions) -> Store:
        """Open a store, empty at the start of each test; the stores of a test share objects."""

    @abstractmethod
    def write_back_door(self, key: str, data: bytes) -> None:
        """Write an object without the store, so that reads are not tested by writes."""

    @abstractmethod
    def read_back_door(self, key: str) -> bytes:
        """Read an object without the store.

        Raises:
            KeyError: There is none.
        """

    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[Any]:
        """Open the store with the API under test."""
        async with self.opened() as store:
            yield store

    def opened(self) -> Any:
        """Return another store of the same objects, with the API under test."""
        store = self.open_store(transfer=OPTIONS)
        return store if self.face == "async" else BlockingAdapter(store)

    def write_all(self, objects: dict[str, bytes]) -> None:
        """Write objects without the store."""
        for key, data in objects.items():
            self.write_back_door(key, data)

    def is_absent(self, key: str) -> bool:
        """Return whether there is no such object, without the store."""
        try:
            self.read_back_door(key)
        except KeyError:
            return True
        return False

    def require(self, capability: str) -> None:
        """Skip the test if the service lacks a capability."""
        if not getattr(self.can, capability):
            pytest.skip(f"the service declares {capability}=False")


class BlockingAdapter:
    """`aioflux.sync.Store` with the asynchronous methods of `Store`, so that one suite tests both.

    A call blocks the test's event loop until it is done, as it does for a caller in a notebook.
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
            return _as_generator(method)
        if inspect.iscoroutinefunction(model):
            return _as_coroutine(method)
        return _as_context_manager(method) if callable(method) else method


def _as_coroutine(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **settings: Any) -> Any:
        return method(*args, **settings)

    return call


def _as_generator(method: Callable[..., Any]) -> Callable[..., Any]:
    async def iterate(*args: Any, **settings: Any) -> AsyncIterator[Any]:
        iterator = method(*args, **settings)
        try:
            for item in iterator:
                yield item
        finally:
            iterator.close()

    return iterate


def _as_context_manager(method: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def enter(*args: Any, **settings: Any) -> AsyncIterator[Any]:
        with method(*args, **settings) as opened:
            yield _BlockingStream(opened)

    return enter


class _BlockingStream:
    """A blocking reader or writer with asynchronous `read`, `readinto` and `write`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        return _as_coroutine(attribute) if name in {"read", "readinto", "write"} else attribute
