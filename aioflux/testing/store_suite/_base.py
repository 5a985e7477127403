"""What every part of the suite stands on: the hooks of a subclass, and the store under test."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import pytest
import pytest_asyncio

from aioflux.options import MIB, TransferOptions
from aioflux.testing.store_suite._face import BlockingFace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aioflux.store import Store

__all__ = ["KIB", "OPTIONS", "PART", "SuiteBase", "SuiteCapabilities", "drain", "pattern"]

T = TypeVar("T")

KIB = 1024
PART = 5 * MIB
"""The smallest part that services take."""

OPTIONS = TransferOptions(
    max_in_flight=8,
    range_size_bytes=64 * KIB,
    part_size_bytes=PART,
    max_buffered_bytes=2 * PART,
)
"""Small enough that a few objects of a few bytes meet every limit."""


async def drain(items: AsyncIterator[T], into: list[T]) -> None:
    """Append items until there are no more, or the iterator fails."""
    async for item in items:
        into.append(item)  # noqa: PERF401  what came before a failure is kept


def pattern(size: int, *, seed: int = 0) -> bytes:
    """Return bytes that differ from place to place and from seed to seed."""
    return random.Random(seed).randbytes(size)  # noqa: S311  not a secret


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteCapabilities:
    """What the service under test can do; a test of what it cannot is skipped."""

    keeps_metadata: bool = True
    """Content type and the user's metadata come back from `head`."""
    has_checksums: bool = True
    """`ObjectMeta.crc32c` is given."""
    takes_any_key: bool = True
    """Empty segments, dots, trailing slashes and segments of 1024 bytes are names like others."""
    takes_dots: bool = True
    """Names between slashes may be `.` and `..`, and may end with a dot."""
    takes_backslashes: bool = True
    """A backslash is a character like others."""
    composes: bool = True
    """Objects can be concatenated by the service; where they cannot, it is refused."""
    keeps_uploads_apart: bool = True
    """Two uploads of one key may be under way, and the last to end wins; else the first does, and
    the other one fails."""
    max_compose_sources: int = 32
    """Sources of one compose."""
    page_size: int = 5000
    """Objects in one page of a listing, at most."""


class SuiteBase(ABC):
    """Hooks and fixtures.

    Attributes:
        face: Whether the store is called through its awaitable or its blocking face.
        can: What the service can do.
    """

    face: ClassVar[Literal["async", "sync"]] = "async"
    can: ClassVar[SuiteCapabilities] = SuiteCapabilities()

    @abstractmethod
    def open_store(self, *, transfer: TransferOptions) -> Store:
        """Open the place under test, empty at the start of each test; one place within a test."""

    @abstractmethod
    def write_back_door(self, key: str, data: bytes) -> None:
        """Write an object past the store, so that reads are not tested by writes."""

    @abstractmethod
    def read_back_door(self, key: str) -> bytes:
        """Read an object past the store.

        Raises:
            KeyError: There is none.
        """

    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[Any]:
        """Open the store through the face under test."""
        async with self.opened() as store:
            yield store

    def opened(self) -> Any:
        """Return another store of the same place."""
        store = self.open_store(transfer=OPTIONS)
        return store if self.face == "async" else BlockingFace(store)

    def write_all(self, objects: dict[str, bytes]) -> None:
        """Write objects past the store."""
        for key, data in objects.items():
            self.write_back_door(key, data)

    def is_absent(self, key: str) -> bool:
        """Look past the store whether there is no such object."""
        try:
            self.read_back_door(key)
        except KeyError:
            return True
        return False

    def require(self, ability: str) -> None:
        """Skip the test where the service lacks an ability of `SuiteCapabilities`."""
        if not getattr(self.can, ability):
            pytest.skip(f"the service declares {ability}=False")
