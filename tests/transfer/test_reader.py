"""Reading an object as a stream: what is prefetched, and what a failure leaves."""

from __future__ import annotations

import asyncio
import gc
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ChecksumError, StorageError, TransientError
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import MIB, PART, REFUSE, ScriptedService, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    import aioflux
    from aioflux._services.base import ReadRequest

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


@given(st.lists(moves, max_size=12), st.sets(st.integers(0, 30), max_size=3))
def test_no_wrong_byte_is_returned_if_ranges_are_read_twice(
    moves: list[tuple[str, int]], wrong_reads: set[int]
) -> None:
    asyncio.run(read_over_plain_http(moves, wrong_reads))


async def read_over_plain_http(moves: list[tuple[str, int]], wrong_reads: set[int]) -> None:
    scripted = plain(ScriptedService("reader-plain"))
    meta = scripted.put("a", DATA)
    flip = Fault(kind="flip", num_bytes=3)
    scripted.service.fail("get", *(flip if at in wrong_reads else None for at in range(31)))
    model = io.BytesIO(DATA)
    try:
        # Two of the ten ranges are held.
        async with scripted.store.open_reader(meta, read_ahead_bytes=2000) as reader:
            for move, number in moves:
                if move == "read":
                    assert await reader.read(number) == model.read(number)
                else:
                    whence = io.SEEK_SET if move == "seek" else io.SEEK_END
                    assert reader.seek(number, whence) == model.seek(number, whence)
    except ChecksumError:
        return


def plain(scripted: ScriptedService) -> ScriptedService:
    """A service whose transport does not detect changed bytes; ranges are read twice."""
    scripted.service.capabilities = replace(scripted.service.capabilities, guarded_transport=False)
    scripted.verify_ranges = True
    return scripted


def requested(scripted: ScriptedService) -> list[tuple[int, int]]:
    """Return a list that receives each range that is requested from now on."""
    ranges: list[tuple[int, int]] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        ranges.append((request.start, request.end))
        return await inner(request, **settings)

    scripted.service.get = get  # type: ignore[method-assign]
    return ranges


def num_bytes(ranges: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


async def test_a_prefetch_during_a_read_stops_no_request(scripted: ScriptedService) -> None:
    meta = plain(scripted).put("a", DATA)
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        await asyncio.sleep(0)
        return await inner(request, **settings)

    scripted.service.get = get  # type: ignore[method-assign]
    async with scripted.store.open_reader(meta, read_ahead_bytes=2000) as reader:
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(100):
            while not reading.done():
                await asyncio.sleep(0)
                await reader.prefetch()
        assert await reading == DATA


@pytest.mark.parametrize("num_more", [1, 2000, MIB, 3 * MIB])
async def test_a_directory_at_the_end_is_read_first_at_little_cost(
    scripted: ScriptedService, num_more: int
) -> None:
    """The object is a little larger than the prefetched bytes."""
    data = pattern(24 * MIB + num_more)
    meta = scripted.put("a", data)
    store = scripted.new_store(range_size_bytes=8 * MIB, max_buffered_bytes=24 * MIB)
    ranges = requested(scripted)
    async with store.open_reader(meta) as reader:
        assert await reader.read(MIB) == data[:MIB]
        reader.seek(-100, io.SEEK_END)
        assert await reader.read() == data[-100:]
        reader.seek(0)
        assert b"".join([await reader.read(4 * MIB) for _ in range(7)]) == data
    assert sum(end - start for start, end in ranges) <= 1.3 * len(data)


@pytest.mark.parametrize(("is_guarded", "num_reads"), [(False, 2), (True, 1)])
async def test_short_reads_far_apart_request_their_bytes_only(
    scripted: ScriptedService, is_guarded: bool, num_reads: int
) -> None:
    data = pattern(8 * PART)
    meta = (scripted if is_guarded else plain(scripted)).put("a", data)
    ranges = requested(scripted)
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        for start in (5 * PART + 7, 2 * PART, 6 * PART + 9):
            reader.seek(start)
            assert await reader.read(1000) == data[start:][:1000]
            assert reader.tell() == start + 1000
        # Each second copy begins a byte earlier, and ends a byte later.
        assert num_bytes(ranges) == 3000 * num_reads + 6 * (num_reads - 1)
        ranges.clear()
        await reader.read(1000)  # in order after a jump
        assert num_bytes(ranges) >= PART


async def test_the_second_jump_into_a_range_requests_all_of_it(scripted: ScriptedService) -> None:
    data = pattern(8 * PART)
    meta = scripted.put("a", data)
    ranges = requested(scripted)
    store = scripted.new_store(range_size_bytes=PART, max_buffered_bytes=4 * PART)
    async with store.open_reader(meta) as reader:
        for at in range(0, 9000, 1000):  # two places in turn
            for start in (5 * PART + at, 6 * PART + at):
                reader.seek(start)
                assert await reader.read(1000) == data[start:][:1000]
    assert len(ranges) <= 6


@pytest.mark.parametrize("num_wrong", [1, 2, 3])
async def test_wrong_bytes_of_a_short_read_are_never_returned(
    scripted: ScriptedService, num_wrong: int
) -> None:
    data = pattern(8 * PART)
    meta = plain(scripted).put("a", data)
    async with one_range_ahead(scripted).open_reader(meta) as reader:
        reader.seek(5 * PART)
        scripted.service.fail("get", *[Fault(kind="flip", num_bytes=3)] * num_wrong)
        if num_wrong == 1:
            assert await reader.read(9) == data[5 * PART :][:9]
        else:
            with pytest.raises(ChecksumError, match="three different contents"):
                await reader.read(9)
            assert reader.tell() == 5 * PART
            assert await reader.read(9) == data[5 * PART :][:9]


@pytest.mark.parametrize("options", [{"verify": False}, {"verify_ranges": False}, {}])
async def test_a_short_read_confirms_only_bytes_that_nothing_verified(
    scripted: ScriptedService, options: dict[str, Any]
) -> None:
    data = pattern(8 * PART)
    meta = plain(scripted).put("a", data)
    async with one_range_ahead(scripted, **options).open_reader(meta) as reader:
        if not options:
            await reader.read()  # with the crc32c of the object
        else:
            await reader.read(PART + 1)
        ranges = requested(scripted)
        reader.seek(5 * PART)
        assert await reader.read(9) == data[5 * PART :][:9]
        assert num_bytes(ranges) <= 9 + 11


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
            await reader.read(PART)
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


async def test_a_read_whose_reader_is_closed_meanwhile_fails_by_name(
    scripted: ScriptedService,
) -> None:
    meta = plain(scripted).put("a", DATA)
    started = asyncio.Event()

    async def never(*_: Any, **__: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    scripted.service.get = never  # type: ignore[method-assign]
    async with scripted.store.open_reader(meta) as reader:
        reading = asyncio.create_task(reader.read())
        await started.wait()
    with pytest.raises(StorageError, match=r"could not read .*: its reader was closed"):
        await reading
    async with scripted.store.open_reader(meta) as reader:
        reading = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("size", [1000, 2 * PART])
@pytest.mark.parametrize("num_before", [0, MIB])
async def test_closing_ends_a_read_after_a_jump(
    scripted: ScriptedService, size: int, num_before: int
) -> None:
    """Also while the bytes that were returned before are read again."""
    meta = plain(scripted).put("a", pattern(8 * PART))
    started, num_waiting = asyncio.Event(), 0

    async def never(*_: Any, **__: Any) -> Any:
        nonlocal num_waiting
        num_waiting += 1
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            num_waiting -= 1

    async with asyncio.timeout(10), one_range_ahead(scripted).open_reader(meta) as reader:
        await reader.read(num_before)
        scripted.service.get = never  # type: ignore[method-assign]
        reader.seek(5 * PART + 7)
        reading = asyncio.create_task(reader.read(size))
        await started.wait()
        await reader.aclose()
        assert not num_waiting
        with pytest.raises(StorageError, match=r"could not read .*: its reader was closed"):
            await reading
