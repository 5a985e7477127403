"""Memory that becomes resident in one call."""

from __future__ import annotations

import asyncio
import mmap
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from aioflux._services.base import WriteRequest
from aioflux._transfer import prefault as _prefault
from aioflux._transfer.get import fetch_into
from aioflux._transfer.prefault import Prefaulter, prefault
from aioflux._transfer.writer import put
from tests.transfer.scripted_service import MIB, PART, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.transfer.scripted_service import ScriptedService

SIZE = 8 * MIB
READ, WRITE = 22, 23
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise(2) of Linux")


def untouched(size: int) -> memoryview:
    """Memory that nobody has read or written."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every call of madvise, which is made as well."""
    calls: list[tuple[int, int, int]] = []
    inner: Callable[..., int] = _prefault._madvise

    def madvise(*args: int) -> int:
        calls.append(args)
        # Only the thread may keep the caller waiting.
        is_loop = threading.current_thread() is threading.main_thread()
        assert is_loop == (args[2] == READ)
        return inner(*args)

    monkeypatch.setattr(_prefault, "_madvise", madvise)
    return calls


def test_what_was_never_touched_is_asked_for_once(advised: list[tuple[int, int, int]]) -> None:
    view = untouched(SIZE)[5 : SIZE - 3].toreadonly()
    prefault(view)
    ((begin, num_bytes, advice),) = advised
    assert begin % 4096 == 0
    assert num_bytes == SIZE - 3
    assert advice == READ
    assert bytes(view[:10]) == bytes(10)


def test_what_is_there_is_left_alone(advised: list[tuple[int, int, int]]) -> None:
    prefault(memoryview(b"x" * SIZE))
    prefault(memoryview(bytearray(b"x") * SIZE)[100:])
    assert advised == []


async def test_ranges_are_read_into_memory_that_is_there(
    scripted: ScriptedService, advised: list[tuple[int, int, int]]
) -> None:
    data = pattern(SIZE)
    meta = scripted.put("a", data)
    view = untouched(SIZE)
    session = scripted.new_session(range_size_bytes=SIZE // 2)
    inner = scripted.service.get

    async def get(*args: object, **settings: object) -> object:
        # The answer takes longer than the thread needs for both.
        async with asyncio.timeout(100):
            while is_slow and len(advised) < 2:  # noqa: ASYNC110  the thread brings it about
                await asyncio.sleep(0.005)
        return await inner(*args, **settings)

    scripted.service.get = get
    is_slow = True
    assert await fetch_into(session, "a", view, start=0, meta=meta) == SIZE
    assert view == data
    assert [(num_bytes, advice) for _, num_bytes, advice in advised] == [(SIZE // 2, WRITE)] * 2
    is_slow = False
    assert await fetch_into(session, "a", view, start=0, meta=meta) == SIZE
    assert len(advised) == 2
    await session.aclose()


def all_populating_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "aioflux-prefault" in thread.name}


@pytest.fixture
def populating_threads() -> Callable[[], set[threading.Thread]]:
    """Those that are new: stores of other tests, which live longer, have theirs."""
    others = all_populating_threads()
    return lambda: all_populating_threads() - others


async def test_the_thread_ends_with_the_store(
    populating_threads: Callable[[], set[threading.Thread]],
) -> None:
    populator = Prefaulter()
    for _ in range(3):
        async with populator.during(untouched(SIZE)):
            await asyncio.sleep(0.02)
    assert len(populating_threads()) == 1
    populator.close()
    for thread in populating_threads():
        await asyncio.to_thread(thread.join, 100)
    assert populating_threads() == set()


async def test_memory_is_let_go_of_before_the_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may resize it then, also where the read was cancelled."""
    begun, may_end = threading.Event(), threading.Event()
    num_calls = 0

    def madvise(*_: int) -> int:
        nonlocal num_calls
        num_calls += 1
        begun.set()
        may_end.wait(100)
        return 0

    monkeypatch.setattr(_prefault, "_madvise", madvise)
    monkeypatch.setattr(_prefault, "_is_resident", lambda *_: False)
    populator = Prefaulter()
    taken, waiting = bytearray(64 * MIB), bytearray(64 * MIB)

    async def read(memory: bytearray) -> None:
        with memoryview(memory) as view:
            async with populator.during(view):
                await asyncio.Event().wait()

    reads = [asyncio.create_task(read(memory)) for memory in (taken, waiting)]
    await asyncio.to_thread(begun.wait, 100)
    for task in reads:
        task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*reads, return_exceptions=True)
    taken.clear()
    waiting.clear()
    populator.close()
    assert num_calls == 1


@pytest.fixture
def slow_thread(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The thread begins a call, and ends it when it is told to."""
    begun, may_end = threading.Event(), threading.Event()

    def madvise(*_: int) -> int:
        begun.set()
        may_end.wait(100)
        return 0

    monkeypatch.setattr(_prefault, "_madvise", madvise)
    monkeypatch.setattr(_prefault, "_is_resident", lambda *_: False)
    return begun, may_end


async def test_memory_that_waits_in_line_is_let_go_of(
    slow_thread: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_end = slow_thread
    populator = Prefaulter()
    waiting = bytearray(SIZE)

    async def read() -> None:
        async with populator.during(memoryview(waiting)):
            await asyncio.sleep(0.05)

    async with populator.during(untouched(SIZE)):
        await asyncio.to_thread(begun.wait, 100)
        await asyncio.create_task(read())
        waiting.clear()  # a BufferError where anybody holds it
        assert not waiting
        assert not may_end.is_set()
        may_end.set()
    populator.close()


async def test_a_read_that_is_cancelled_late_waits_for_the_thread(
    slow_thread: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_end = slow_thread
    populator = Prefaulter()

    async def read() -> None:
        async with populator.during(untouched(SIZE)):
            await asyncio.to_thread(begun.wait, 100)

    reading = asyncio.create_task(read())
    await asyncio.to_thread(begun.wait, 100)
    for _ in range(3):
        await asyncio.sleep(0.01)
        reading.cancel()
    await asyncio.sleep(0.01)
    assert not reading.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    populator.close()


async def test_a_process_that_may_have_no_more_threads_reads(
    monkeypatch: pytest.MonkeyPatch, advised: list[tuple[int, int, int]]
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    populator, memory = Prefaulter(), bytearray(SIZE)
    monkeypatch.setattr(_prefault, "_is_resident", lambda *_: False)

    async def read() -> None:
        async with populator.during(memoryview(memory)):
            await asyncio.sleep(0.02)

    await asyncio.create_task(read())
    memory.clear()
    assert advised == []


async def test_after_the_store_is_closed_no_thread_begins(
    advised: list[tuple[int, int, int]],
    populating_threads: Callable[[], set[threading.Thread]],
) -> None:
    populator = Prefaulter()
    async with populator.during(untouched(SIZE)):
        populator.close()
        await asyncio.sleep(0.02)
    assert (advised, populating_threads()) == ([], set())


async def test_an_answer_that_is_quick_needs_no_thread(advised: list[tuple[int, int, int]]) -> None:
    populator = Prefaulter()
    async with populator.during(untouched(SIZE)):
        pass
    await asyncio.sleep(0.01)
    assert advised == []
    populator.close()


async def test_parts_are_sent_from_memory_that_is_there(
    scripted: ScriptedService, advised: list[tuple[int, int, int]]
) -> None:
    await put(scripted.session, WriteRequest("a"), untouched(2 * PART))
    assert scripted.get("a") == bytes(2 * PART)
    assert [(num_bytes, advice) for _, num_bytes, advice in advised] == [(PART, READ)] * 2


def test_little_is_left_alone(advised: list[tuple[int, int, int]]) -> None:
    prefault(untouched(MIB - 4096))
    prefault(memoryview(b""))
    assert advised == []


def test_a_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prefault, "_madvise", lambda *_: -1)
    view = untouched(SIZE)
    prefault(view)
    assert view == bytes(SIZE)


def test_elsewhere_nothing_is_done(
    advised: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_prefault, "_libc", None)
    prefault(untouched(SIZE))
    assert advised == []
