"""Base class of the store tests: methods to implement, fixtures, and test data."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import pytest
import pytest_asyncio

from aioflux import sync
from aioflux.options import MIB, TransferOptions
from aioflux.store import Store

T = TypeVar("T")

# Let pytest show the values in failing assertions. Modules must be registered before their first
# import. All of these modules import this module first.
_MODULES = ("files", "keys", "list", "many", "read", "server_side", "streams", "write")
pytest.register_assert_rewrite(*(f"aioflux.testing.store_suite._{name}" for name in _MODULES))

KIB = 1024
PART = 5 * MIB
"""Smallest part size that services accept, in bytes."""

_PERIOD = 1_000_003
"""Bytes after which `pattern` repeats: no range or part size is a multiple of this number."""

OPTIONS = TransferOptions(
    max_in_flight=8,
    range_size_bytes=64 * KIB,
    part_size_bytes=PART,
    max_buffered_bytes=2 * PART,
)
"""Options with limits so low that a few small objects reach all of them."""


async def drain(items: AsyncIterator[T], into: list[T]) -> None:
    """Append all items to a list. If the iterator raises, the list has the earlier items."""
    async for item in items:
        into.append(item)  # noqa: PERF401  a comprehension would lose the items before an error


def pattern(size: int, *, seed: int = 0) -> bytes:
    """Return pseudo-random bytes, different for each seed."""
    block = random.Random(seed).randbytes(min(size, _PERIOD))  # noqa: S311  not a secret
    return (block * (size // _PERIOD + 1))[:size]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteCapabilities:
    """Capabilities of the service under test. Tests of missing capabilities are skipped."""

    keeps_metadata: bool = True
    """`head` returns the attributes and the user's metadata as they were written. If False, a write
    with an attribute other than the content type must raise UnsupportedError."""
    other_storage_class: str = ""
    """A storage class that objects do not have by default; empty if the service has none."""
    has_checksums: bool = True
    """`ObjectMeta.crc32c` is never None."""
    takes_any_key: bool = True
    """Keys may have empty segments, trailing slashes, and segments of 1024 bytes."""
    takes_dots: bool = True
    """Segments of keys may be `.` or `..`, and may end with a dot."""
    takes_backslashes: bool = True
    """Keys may have backslashes."""
    composes: bool = True
    """The service can concatenate objects. If False, `compose` must raise UnsupportedError."""
    keeps_uploads_apart: bool = True
    """Two uploads to one key may be open at once, and the object is the upload completed last. If
    False, the object is the upload completed first, and completing the other upload must fail."""
    max_compose_sources: int = 32
    """Maximum number of sources of one `compose`."""
    page_size: int = 5000
    """Maximum number of objects in one page of a listing."""


class SuiteBase(ABC):
    """Methods that a subclass implements, and helpers of the tests.

    Attributes:
        face: API under test: "async" for `aioflux.Store`, "sync" for `aioflux.sync.Store`.
        can: Capabilities of the service.
    """

    face: ClassVar[Literal["async", "sync"]] = "async"
    can: ClassVar[SuiteCapabilities] = SuiteCapabilities()

    @abstractmethod
    def open_store(self, *, transfer: TransferOptions) -> Store:
        """Open a store, which must be empty at the start of each test.

        All stores that one test opens must have the same objects.
        """

    @abstractmethod
    def write_back_door(self, key: str, data: bytes) -> None:
        """Write an object without the store, so that a test of reads does not depend on `put`."""

    @abstractmethod
    def read_back_door(self, key: str) -> bytes:
        """Read an object without the store.

        Raises:
            KeyError: No object has this key.
        """

    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[Any]:
        """Open the store that the test uses, and close it after the test."""
        async with self.opened() as store:
            yield store

    def opened(self) -> Any:
        """Return a new store with the same objects and with the asynchronous methods of `Store`."""
        store = self.open_store(transfer=OPTIONS)
        return store if self.face == "async" else BlockingAdapter(store)

    def write_all(self, objects: dict[str, bytes]) -> None:
        """Write objects without the store."""
        for key, data in objects.items():
            self.write_back_door(key, data)

    def is_absent(self, key: str) -> bool:
        """Return whether no object has this key, by `read_back_door`."""
        try:
            self.read_back_door(key)
        except KeyError:
            return True
        return False

    def attributes(self) -> dict[str, Any]:
        """Return all attributes but metadata, with values that objects do not have by default."""
        return {
            "content_type": "text/csv",
            "content_encoding": "gzip",
            "content_disposition": 'attachment; filename="a b.csv"',
            "cache_control": "max-age=60",
            "storage_class": self.can.other_storage_class,
        }

    def require(self, capability: str) -> None:
        """Skip the test if the service lacks a capability."""
        if not getattr(self.can, capability):
            pytest.skip(f"the service declares {capability}=False")


class BlockingAdapter:
    """Wrapper that lets the asynchronous tests run on `aioflux.sync.Store`.

    Every method of the wrapper is asynchronous and calls the blocking method of the same name. The
    event loop of the test is blocked during the call, as the event loop of a notebook would be.
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
        async_method = inspect.getattr_static(Store, name)
        annotations = getattr(async_method, "__annotations__", {})
        if str(annotations.get("return")).startswith("AsyncGenerator"):
            return _as_generator(method)
        if inspect.iscoroutinefunction(async_method):
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
    """Wrapper of a blocking reader or writer, with asynchronous `read`, `readinto` and `write`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        return _as_coroutine(attribute) if name in {"read", "readinto", "write"} else attribute
