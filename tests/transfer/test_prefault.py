"""Memory that becomes resident by few calls, before it is sent or while a read waits."""

from __future__ import annotations

import asyncio
import mmap
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from aioflux._transfer.prefault import Prefaulter, prefault
from tests.transfer.scripted_service import MIB, PART

if TYPE_CHECKING:
    from tests.transfer.scripted_service import ScriptedService

SIZE = 8 * MIB
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
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


class SlowMadvise:
    """A call of madvise that ends when the test says so."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.num_calls = 0

    def __call__(self, *_: int) -> int:
        self.num_calls += 1
        self.begun.set()
        self.may_end.wait(100)
        return 0


async def test_memory_of_a_read_becomes_resident_in_a_thread() -> None:
    view, madvise = untouched(SIZE), Madvise()
    prefaulter = Prefaulter(madvise)
    async with prefaulter.during(view), asyncio.timeout(100):
        while len(madvise.calls) < 2:  # noqa: ASYNC110  the thread makes them
            await asyncio.sleep(0.005)
    prefaulter.close()
    steps = [(num_bytes, advice) for _, num_bytes, advice in madvise.calls]
    assert steps == [(SIZE // 2, MADV_POPULATE_WRITE)] * 2


async def test_a_quick_response_needs_no_thread() -> None:
    madvise = Madvise()
    prefaulter = Prefaulter(madvise)
    async with prefaulter.during(untouched(SIZE)):
        pass
    await asyncio.sleep(0.01)
    prefaulter.close()
    assert madvise.calls == []


async def test_no_thread_starts_after_the_store_is_closed() -> None:
    madvise = Madvise()
    prefaulter = Prefaulter(madvise)
    async with prefaulter.during(untouched(SIZE)):
        prefaulter.close()
        await asyncio.sleep(0.02)
    assert madvise.calls == []


async def test_a_process_that_may_start_no_more_threads_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    madvise = Madvise()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        async with Prefaulter(madvise).during(untouched(SIZE)):
            await asyncio.sleep(0.02)
    assert madvise.calls == []


async def test_a_cancelled_read_waits_for_the_call_that_uses_its_memory() -> None:
    """Its owner may free the memory next."""
    madvise = SlowMadvise()
    prefaulter = Prefaulter(madvise)

    async def read(memory: mmap.mmap) -> None:
        with memoryview(memory) as view:
            async with prefaulter.during(view):
                await asyncio.Event().wait()

    used, queued = (mmap.mmap(-1, SIZE) for _ in range(2))
    first, second = asyncio.create_task(read(used)), asyncio.create_task(read(queued))
    await asyncio.to_thread(madvise.begun.wait, 100)
    await asyncio.sleep(0.02)
    for _ in range(3):
        first.cancel()
        second.cancel()
        await asyncio.sleep(0.01)
    assert second.cancelled()
    queued.close()
    assert not first.done()
    with pytest.raises(BufferError):
        used.close()
    madvise.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    used.close()
    prefaulter.close()
    assert madvise.num_calls == 1


async def test_a_large_read_fills_untouched_memory(scripted: ScriptedService) -> None:
    data = bytes(range(256)) * (SIZE // 256)
    meta = scripted.put("a", data)
    view = untouched(SIZE)
    assert await scripted.store.get_into(meta, view) == SIZE
    assert view == data
