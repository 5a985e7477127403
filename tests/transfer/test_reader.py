"""Reading an object as a stream: what is prefetched, and what a failure leaves."""

from __future__ import annotations

import asyncio
import gc
import io
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ChecksumError, TransientError
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import PART, REFUSE, ScriptedService, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    import aioflux

DATA = pattern(10_000)
LONG = pattern(2 * PART + 1000)

moves = st.one_of(
    st.tuples(st.just("read"), st.integers(-1, 4000)),
    st.tuples(st.just("seek"), st.integers(0, 12_000)),
    st.tuples(st.just("seek from end"), st.integers(-10_000, 10)),
)


@given(st.lists(moves, max_size=12))
def test_it_reads_as_bytesio_does(moves: list[tuple[str, int]]) -> None:
    asyncio.run(compare(moves))


def one_range_ahead(scripted: ScriptedService, **options: object) -> aioflux.Store:
    return scripted.new_store(range_size_bytes=PART, max_buffered_bytes=PART, **options)


async def compare(moves: list[tuple[str, int]]) -> None:
    scripted = ScriptedService("reader")
    meta = scripted.put("a", DATA)
    model = io.BytesIO(DATA)
    async with scripted.store.open_reader(meta) as reader:
        for move, number in moves:
            if move == "read":
                assert await reader.read(number) == model.read(number)
            elif move == "seek":
                assert reader.seek(number) == model.seek(number)
            else:
                assert reader.seek(number, io.SEEK_END) == model.seek(number, io.SEEK_END)
            assert reader.tell() == model.tell()


async def reach(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        await asyncio.sleep(0)
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110  a thread may prepare memory of a range
            await asyncio.sleep(0.001)


async def test_an_idle_reader_fetches_no_more_than_its_window(
    scripted: ScriptedService,
) -> None:
    step = PART
    store = scripted.new_store(range_size_bytes=step)  # two ranges are held
    meta = scripted.put("a", pattern(4 * step))
    async with store.open_reader(meta) as reader:
        await reader.read(1)
        await reach(lambda: scripted.service.count("get") == 2)
        await reader.read(step)
        await reach(lambda: scripted.service.count("get") == 3)


async def test_a_prefetch_asks_for_the_window_that_is_read_then(scripted: ScriptedService) -> None:
    store = scripted.new_store(range_size_bytes=PART)  # two ranges are held
    meta = scripted.put("a", pattern(4 * PART))
    async with store.open_reader(meta) as reader:
        await reader.prefetch()
        await reach(lambda: scripted.service.count("get") == 2)
        assert reader.tell() == 0
        assert await reader.read(2) == pattern(4 * PART)[:2]
        assert scripted.service.count("get") == 2
    with pytest.raises(ValueError, match="closed"):
        await reader.prefetch()


async def test_a_read_after_a_failed_one_gives_the_same_bytes(scripted: ScriptedService) -> None:
    meta = scripted.put("a", LONG)
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        assert await reader.read(PART) == LONG[:PART]
        scripted.service.fail("get", *[REFUSE] * 4)
        with pytest.raises(TransientError):
            await reader.read(PART)
        assert reader.tell() == PART
        assert await reader.read(PART) == LONG[PART : 2 * PART]
        assert await reader.read() == LONG[2 * PART :]


async def test_a_cancelled_read_loses_nothing(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    hang = Fault(kind="hang")
    scripted.service.fail("get", None, hang)
    async with scripted.store.open_reader(meta) as reader:
        reading = asyncio.create_task(reader.read())
        await hang.reached.wait()
        await reach(lambda: not reading.done())
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        hang.released.set()
        assert await reader.read() == DATA
    assert scripted.is_clean()


async def test_wrong_bytes_are_an_error_before_the_end(scripted: ScriptedService) -> None:
    meta = scripted.put("a", LONG)
    scripted.service.fail("get", Fault(kind="flip", num_bytes=3))
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        assert len(await reader.read(2 * PART)) == 2 * PART
        for _ in range(2):  # also where the error was not taken for the end
            with pytest.raises(ChecksumError, match="/a"):
                await reader.read()
    assert scripted.is_clean()


async def test_a_range_is_not_read_again_after_the_last_comparison(
    scripted: ScriptedService,
) -> None:
    meta = scripted.put("a", LONG)
    scripted.service.fail("get", Fault(kind="flip", num_bytes=3))
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        await reader.read(2 * PART)
        with pytest.raises(ChecksumError, match="/a"):
            await reader.read()
    assert scripted.service.count("get") == 5  # three ranges, the last one three times


@pytest.mark.parametrize("size", [10_000, 999], ids=["ten ranges", "one range"])
async def test_wrong_bytes_that_no_one_has_yet_are_read_again(
    scripted: ScriptedService, size: int
) -> None:
    meta = scripted.put("a", DATA[:size])
    scripted.service.fail("get", Fault(kind="flip", num_bytes=3))
    async with scripted.store.open_reader(meta) as reader:
        assert await reader.read() == DATA[:size]


async def test_the_last_range_is_read_again_where_it_is_wrong(scripted: ScriptedService) -> None:
    meta = scripted.put("a", LONG)
    scripted.service.fail("get", None, None, Fault(kind="flip"), Fault(kind="flip"))
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        assert await reader.read() == LONG
    assert scripted.service.count("get") == 5


async def test_a_range_that_is_fetched_again_must_be_what_was_handed_out(
    scripted: ScriptedService,
) -> None:
    meta = scripted.put("a", LONG)
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        for faults, matches in (
            ([None], True),
            ([Fault(kind="flip")] * 2, True),
            ([Fault(kind="flip")] * 3, False),
        ):
            reader.seek(0)
            assert await reader.read(9) == LONG[:9]
            reader.seek(PART)
            await reader.read(9)
            scripted.service.fail("get", *faults)
            reader.seek(0)
            if matches:
                assert await reader.read(9) == LONG[:9]
                continue
            with pytest.raises(ChecksumError, match="different when they were read again"):
                await reader.read(9)


async def test_a_broken_body_is_resumed(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    scripted.service.fail(
        "get", Fault(kind="cut", num_bytes=300), Fault(kind="short", num_bytes=300)
    )
    async with scripted.store.open_reader(meta) as reader:
        assert await reader.read() == DATA


async def test_closing_ends_what_is_fetched_ahead(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    before = asyncio.all_tasks()
    scripted.service.fail("get", None, *[Fault(kind="hang") for _ in range(9)])
    async with scripted.store.open_reader(meta) as reader:
        assert await reader.read(10) == DATA[:10]
    await reader.aclose()
    assert asyncio.all_tasks() == before
    assert scripted.is_clean()


async def test_a_failed_prefetch_of_a_reader_that_is_never_closed_is_not_logged(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    store = scripted.new_store(range_size_bytes=PART)  # two ranges are held
    meta = scripted.put("a", LONG)
    async with store.open_reader(meta) as reader:
        never_closed = type(reader)(store.session, meta)  # no generator that closes it
    scripted.service.fail("get", None, *[REFUSE] * 4)
    before = asyncio.all_tasks()
    assert await never_closed.read(1) == LONG[:1]
    await reach(lambda: asyncio.all_tasks() == before)
    caplog.clear()  # the retries
    del never_closed
    gc.collect()
    assert caplog.messages == []


async def test_a_position_before_the_first_byte_is_refused(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA)
    async with scripted.store.open_reader(meta) as reader:
        with pytest.raises(ValueError, match="-1"):
            reader.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            reader.seek(0, 3)
        assert reader.tell() == 0
    with pytest.raises(ValueError, match="closed"):
        await reader.read()


async def test_always_reads_every_range_twice_from_the_start() -> None:
    """So that a wrong byte is mended, which an error at the end could only tell of."""
    scripted = ScriptedService("reader-always")
    data = pattern(5_000)
    meta = scripted.put("a", data)
    store = scripted.new_store(verify_ranges="always")
    scripted.service.fail("get", Fault(kind="flip", num_bytes=7))
    async with store.open_reader(meta) as reader:
        assert await reader.read(1_000) == data[:1_000]
        assert await reader.read() == data[1_000:]
    assert scripted.service.count("get") >= 10
