"""Memory that becomes resident by one call before it is sent."""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING

import pytest

from aioflux._transfer.prefault import prefault
from tests.transfer.scripted_service import MIB, PART

if TYPE_CHECKING:
    from tests.transfer.scripted_service import ScriptedService

SIZE = 8 * MIB
MADV_POPULATE_READ = 22
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise(2) of Linux")


def untouched(size: int) -> memoryview:
    """Return memory that was never read or written."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Madvise:
    """The calls of madvise, none of which is made."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, begin: int, num_bytes: int, advice: int) -> int:
        self.calls.append((begin, num_bytes, advice))
        return -1


def test_untouched_memory_is_advised_once() -> None:
    view, madvise = untouched(SIZE)[5 : SIZE - 3].toreadonly(), Madvise()
    prefault(view, madvise)
    ((begin, num_bytes, advice),) = madvise.calls
    assert begin % 4096 == 0
    assert num_bytes == SIZE - 3
    assert advice == MADV_POPULATE_READ


def test_memory_becomes_resident() -> None:
    view, again = untouched(SIZE), Madvise()
    prefault(view)
    prefault(view, again)
    assert len(again.calls) <= 1  # an older kernel rejects the first call
    assert view == bytes(SIZE)


@pytest.mark.parametrize(
    "view",
    [memoryview(b"x" * SIZE), memoryview(bytearray(b"x") * SIZE)[100:], untouched(MIB - 4096)],
    ids=["resident", "resident, writable", "small"],
)
def test_other_memory_is_not_advised(view: memoryview) -> None:
    madvise = Madvise()
    prefault(view, madvise)
    assert madvise.calls == []


def test_without_madvise_nothing_is_done() -> None:
    view = untouched(SIZE)
    prefault(view, None)
    assert view == bytes(SIZE)


async def test_parts_are_sent_from_untouched_memory(scripted: ScriptedService) -> None:
    await scripted.store.put("a", untouched(2 * PART))
    assert scripted.get("a") == bytes(2 * PART)
