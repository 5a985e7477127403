"""Ranges, which no checksum of the service covers; and bodies that break, on the wire."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import ChecksumError, NotFoundError, PreconditionFailedError, TransientError
from aioflux._services.base import Body, ReadRequest
from aioflux._transfer.retry import with_retry
from aioflux._values.checksums import crc32c
from aioflux.options import MIB
from aioflux.store import read_hashed
from aioflux.testing import GCSServer
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import PART, ScriptedService, pattern

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


DATA = pattern(3500)  # four ranges
FLIP = Fault(kind="flip", num_bytes=2)


async def into(store: aioflux.Store, key: str | aioflux.ObjectMeta, start: int, size: int) -> bytes:
    buffer = bytearray(size)
    num_read = await store.get_into(key, memoryview(buffer), start=start)
    return bytes(buffer[:num_read])


def span(call: str, start: int, end: int) -> Any:
    if call == "get_range":
        return lambda store, key: store.get_range(key, start=start, end=end)
    return lambda store, key: into(store, key, start, end - start)


PARTIAL = [
    pytest.param(span(call, start, end), slice(start, end), id=f"{call} [{start}, {end})")
    for call in ("get_range", "get_into")
    for start, end in ((0, 500), (0, 2500), (100, 600), (100, 2600), (900, 5000), (3400, 9999))
]
each_partial = pytest.mark.parametrize(("read", "part"), PARTIAL)
is_known = pytest.mark.parametrize("is_known", [True, False], ids=["listed", "by name"])


@pytest.fixture
def plain(scripted: ScriptedService) -> ScriptedService:
    """A service whose transport does not detect changed bytes; ranges are read twice."""
    scripted.service.capabilities = replace(scripted.service.capabilities, guarded_transport=False)
    scripted.verify_ranges = True
    return scripted


@each_partial
@is_known
@pytest.mark.parametrize("place", range(6))
async def test_a_wrong_byte_in_a_part_of_an_object_is_mended(
    plain: ScriptedService, read: Any, part: slice, place: int, *, is_known: bool
) -> None:
    meta = plain.put("a", DATA)
    plain.service.fail("get", *[None] * place, FLIP)
    assert await read(plain.store, meta if is_known else "a") == DATA[part]
    assert plain.is_clean()


@each_partial
@is_known
async def test_bytes_that_never_agree_are_an_error(
    plain: ScriptedService, read: Any, part: slice, *, is_known: bool
) -> None:
    meta = plain.put("a", DATA)
    flips = [Fault(kind="flip", num_bytes=3 * at % 90) for at in range(90)]
    plain.service.fail("get", *flips)
    with pytest.raises(ChecksumError, match=r"bytes \[\d+, \d+\) of memory://.*/a") as raised:
        await read(plain.store, meta if is_known else "a")
    assert raised.value.uri.endswith("/a")
    assert plain.is_clean()


@pytest.mark.parametrize("call", ["get_range", "get_into"])
@is_known
async def test_the_same_place_of_both_answers_is_not_the_same_byte(
    plain: ScriptedService, call: str, *, is_known: bool
) -> None:
    meta = plain.put("a", DATA)
    plain.service.fail("get", *[Fault(kind="flip", num_bytes=7)] * 2)
    with pytest.raises(ChecksumError, match=r"bytes \[100, 600\) of .* three different contents"):
        await span(call, 100, 600)(plain.store, meta if is_known else "a")


@each_partial
@is_known
async def test_a_guarded_transport_is_trusted(
    scripted: ScriptedService, read: Any, part: slice, *, is_known: bool
) -> None:
    meta = scripted.put("a", DATA)
    assert await read(scripted.store, meta if is_known else "a") == DATA[part]
    ranges = -(-len(DATA[part]) // 1000)
    assert scripted.service.count("get") <= ranges + 1


@pytest.mark.parametrize(
    ("option", "start", "expected"),
    [(False, 0, True), (False, 100, False), (True, 0, True)],
)
async def test_only_bytes_that_are_compared_are_hashed(
    scripted: ScriptedService,
    monkeypatch: pytest.MonkeyPatch,
    option: bool,
    start: int,
    *,
    expected: bool,
) -> None:
    meta, get = scripted.put("a", DATA), scripted.service.get
    hashed = set()

    async def recorded(request: ReadRequest, *, into: Any = None) -> Body:
        hashed.add(not isinstance(into, memoryview))  # which has no checksum
        return await get(request, into=into)

    monkeypatch.setattr(scripted.service, "get", recorded)
    store = scripted.new_store(verify_ranges=option)
    assert await into(store, meta, start, len(DATA)) == DATA[start:]
    assert hashed == {expected}


async def test_a_hashed_range_comes_with_its_checksum(scripted: ScriptedService) -> None:
    meta, view = scripted.put("a", DATA), memoryview(bytearray(2500))
    for verify in (True, False):
        store = scripted.new_store(verify=verify, verify_ranges=False)
        checksum = await read_hashed(store, meta, view, start=700)
        assert view == DATA[700:3200]
        assert checksum == (crc32c(view) if verify else 0)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("option", [True, False])
@pytest.mark.parametrize("verify", [True, False])
async def test_the_option_decides(
    scripted: ScriptedService, *, option: bool, guarded: bool, verify: bool
) -> None:
    scripted.service.capabilities = replace(
        scripted.service.capabilities, guarded_transport=guarded
    )
    store = scripted.new_store(verify_ranges=option, verify=verify)
    meta = scripted.put("a", DATA)
    scripted.service.fail("get", FLIP)
    got = await store.get_range(meta, start=0, end=500)
    assert (got == DATA[:500]) == (option and verify)


@pytest.mark.parametrize("word", ["auto", "always", "never", None, 1])
def test_only_a_bool_is_an_option(word: Any) -> None:
    with pytest.raises(ValueError, match=f"must be True or False .* not {word!r}"):
        aioflux.TransferOptions(verify_ranges=word)


def test_ranges_are_read_once_by_default() -> None:
    assert not aioflux.TransferOptions().verify_ranges


@pytest.mark.parametrize("call", ["get", "get_range", "get_into"])
@is_known
async def test_a_whole_object_is_read_once(
    plain: ScriptedService, call: str, *, is_known: bool
) -> None:
    meta = plain.put("a", DATA)
    known = meta if is_known else "a"
    if call == "get":
        got = await plain.store.get(known)
    else:
        got = await span(call, 0, 9000)(plain.store, known)
    assert got == DATA
    # Of a part by name, the first range is read before it is known that the part is everything.
    num_more = 0 if call == "get" or is_known else 2
    assert plain.service.count("get") == 4 + num_more


@pytest.mark.parametrize("call", ["get_range", "get_into"])
@is_known
async def test_a_range_that_is_the_whole_object_is_verified(
    scripted: ScriptedService, call: str, *, is_known: bool
) -> None:
    meta = scripted.put("a", DATA[:700])
    scripted.service.fail("get", FLIP)
    read = span(call, 0, 900)
    assert await read(scripted.store, meta if is_known else "a") == DATA[:700]
    scripted.service.fail("get", *[FLIP] * 3)
    with pytest.raises(ChecksumError, match="3 times"):
        await read(scripted.store, meta if is_known else "a")


@pytest.mark.parametrize("size", [0, 1, 700, 3500])
@is_known
async def test_an_object_without_a_checksum_is_read_twice(
    plain: ScriptedService, size: int, *, is_known: bool
) -> None:
    plain.put("a", DATA[:size])
    stored = plain.bucket.objects["a"]
    meta = replace(stored.meta, crc32c=None)
    plain.bucket.objects["a"] = replace(stored, meta=meta)
    known = meta if is_known else "a"
    plain.service.fail("get", *[Fault(kind="flip")] * (size > 0))
    assert await plain.store.get(known) == DATA[:size]


@pytest.mark.parametrize("call", ["get_range", "get_into"])
async def test_two_copies_are_of_one_generation(plain: ScriptedService, call: str) -> None:
    plain.put("a", DATA)
    hang = Fault(kind="hang")
    plain.service.fail("get", None, hang)
    reading = asyncio.create_task(span(call, 100, 600)(plain.store, "a"))
    await hang.reached.wait()
    changed = pattern(3500, seed=9)
    plain.put("a", changed)
    hang.released.set()
    assert await reading == changed[100:600]


@is_known
@pytest.mark.parametrize("call", ["get_range", "get_into"])
async def test_the_second_copy_is_within_the_byte_budget(
    plain: ScriptedService, call: str, *, is_known: bool
) -> None:
    meta = plain.put("a", pattern(20_000))
    store = plain.new_store(max_in_flight_bytes=3000)
    peak = PeakBytes(plain)
    await span(call, 100, 19_000)(store, meta if is_known else "a")
    assert 1000 < peak.peak <= 3000


@pytest.mark.parametrize("size", [0, 50, 100, 101, 1500, 3500])
async def test_an_object_that_is_replaced_under_a_large_range_is_read_anew(
    scripted: ScriptedService, size: int
) -> None:
    scripted.put("a", DATA)
    hang = Fault(kind="hang_after")
    scripted.service.fail("get", hang)
    reading = asyncio.create_task(scripted.store.get_range("a", start=100, end=3000))
    await hang.reached.wait()
    changed, inner = pattern(size, seed=9), scripted.service.get
    scripted.put("a", changed)

    async def get(request: ReadRequest, **settings: Any) -> Body:
        if request.start >= size:  # as after a 416, which has no body
            return await inner(request)
        return await inner(request, **settings)

    scripted.service.get = get
    hang.released.set()
    assert await reading == changed[100:3000]


@is_known
async def test_a_part_beyond_the_end_is_empty(scripted: ScriptedService, *, is_known: bool) -> None:
    meta = scripted.put("a", DATA)
    known = meta if is_known else "a"
    for start in (3500, 3501, 9000):
        assert await scripted.store.get_range(known, start=start, end=start + 9) == b""
        assert await into(scripted.store, known, start, 9) == b""
    assert await into(scripted.store, known, 0, 0) == b""


@pytest.mark.parametrize("call", ["get_range", "get_into"])
async def test_a_part_beyond_the_end_may_come_without_a_generation(
    plain: ScriptedService, call: str
) -> None:
    """The second copy begins within the object, and tells one."""
    plain.put("a", DATA)
    inner = plain.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        body = await inner(request, **settings)
        return replace(body, generation="") if request.start >= len(DATA) else body

    plain.service.get = get
    assert await span(call, 3500, 3600)(plain.store, "a") == b""


@is_known
async def test_a_part_beyond_the_end_of_nothing_is_not_found(
    scripted: ScriptedService, *, is_known: bool
) -> None:
    meta = scripted.put("a", DATA)
    scripted.bucket.remove("a")
    with pytest.raises(NotFoundError):
        await scripted.store.get_range(meta if is_known else "a", start=9000, end=9001)
    with pytest.raises(NotFoundError):
        await into(scripted.store, meta if is_known else "a", 9000, 9)


# --- broken bodies of reads by name --------------------------------------------------------


BY_NAME = [
    pytest.param(lambda store: store.get("a"), id="get"),
    pytest.param(lambda store: span("get_range", 0, 3500)(store, "a"), id="get_range"),
    pytest.param(lambda store: span("get_range", 0, 900)(store, "a"), id="small get_range"),
    pytest.param(lambda store: span("get_into", 0, 3500)(store, "a"), id="get_into"),
]


@pytest.mark.parametrize("read", BY_NAME[::2] + BY_NAME[3:])
async def test_a_read_by_name_goes_on_in_the_generation_it_began_with(
    scripted: ScriptedService, read: Any
) -> None:
    """The object is replaced after the first body broke: two generations are never mixed."""
    scripted.put("a", DATA)
    hang = Fault(kind="hang")
    scripted.service.fail("get", Fault(kind="cut", num_bytes=600), hang)
    reading = asyncio.create_task(read(scripted.store))
    await hang.reached.wait()
    changed = pattern(3500, seed=9)
    scripted.put("a", changed)
    hang.released.set()
    got = await reading
    assert got == changed[: len(got)]


@pytest.mark.parametrize("read", BY_NAME[::2] + BY_NAME[3:])
async def test_an_object_that_goes_away_under_a_broken_read_is_not_found(
    scripted: ScriptedService, read: Any
) -> None:
    scripted.put("a", DATA)
    hang = Fault(kind="hang")
    scripted.service.fail("get", Fault(kind="cut", num_bytes=600), hang)
    reading = asyncio.create_task(read(scripted.store))
    await hang.reached.wait()
    scripted.bucket.remove("a")
    hang.released.set()
    with pytest.raises(NotFoundError):
        await reading


async def test_a_read_that_is_cut_short_each_time_does_not_mix_either(
    scripted: ScriptedService,
) -> None:
    scripted.put("a", DATA)
    gone = Fault(kind="refuse", error=NotFoundError("gone", uri="memory://x/a"))
    scripted.service.fail("get", *[Fault(kind="cut", num_bytes=600), gone] * 4)
    with pytest.raises(PreconditionFailedError, match="replaced while it was read"):
        await scripted.store.get("a")


@is_known
async def test_a_body_that_breaks_often_arrives_all_the_same(
    scripted: ScriptedService, *, is_known: bool
) -> None:
    """An attempt that moved bytes does not count: there are 4 attempts, and 15 breaks."""
    meta = scripted.put("a", DATA)
    scripted.service.fail("get", *[Fault(kind="cut", num_bytes=50)] * 15)
    store = scripted.new_store(range_size_bytes=4000)
    assert await store.get(meta if is_known else "a") == DATA
    scripted.service.fail("get", *[Fault(kind="cut", num_bytes=0)] * 4)
    with pytest.raises(TransientError, match="4 attempts"):
        await store.get(meta if is_known else "a")


async def test_bytes_that_cannot_be_kept_do_not_count_as_moved() -> None:
    policy = aioflux.RetryPolicy(max_attempts=3, initial_seconds=1e-6)
    numbers: list[int] = []

    async def attempt(number: int) -> None:
        numbers.append(number)
        raise TransientError("broke", num_bytes_received=9, generation="1" if number < 4 else "")

    with pytest.raises(TransientError):
        await with_retry(attempt, policy)
    assert numbers == [1, 2, 3, 4, 5]


async def test_without_generations_a_broken_range_is_read_from_its_beginning(
    scripted: ScriptedService,
) -> None:
    meta = replace(scripted.put("a", DATA), generation="")
    asked: list[int] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        asked.append(request.start)
        return await inner(request, **settings)

    scripted.service.get = get
    scripted.service.fail("get", Fault(kind="cut", num_bytes=300))
    store = scripted.new_store(range_size_bytes=4000)
    assert await store.get(meta) == DATA
    assert asked == [0, 0]


@pytest.mark.parametrize("place", [0, 1])
async def test_either_copy_may_break_off(plain: ScriptedService, place: int) -> None:
    meta = plain.put("a", DATA)
    plain.service.fail("get", *[None] * place, Fault(kind="cut", num_bytes=300))
    assert await plain.store.get_range(meta, start=5, end=905) == DATA[5:905]


# --- memory --------------------------------------------------------------------------------


class PeakBytes:
    """Counts the memory that bodies under way have been given, by a service that takes a while."""

    def __init__(self, scripted: ScriptedService) -> None:
        self.peak = self.now = 0
        inner = scripted.service.get

        async def get(request: ReadRequest, *, into: Any = None) -> Any:
            taken = 0

            def take(size: int) -> memoryview:
                nonlocal taken
                taken = size
                self.now += size
                self.peak = max(self.peak, self.now)
                return into(size) if callable(into) else into

            try:
                if into is None:
                    into = lambda size: memoryview(bytearray(size))  # noqa: E731
                if not callable(into):
                    take(into.nbytes)
                    body = await inner(request, into=into)
                else:
                    body = await inner(request, into=take)
                for _ in range(3):
                    await asyncio.sleep(0)
                return body
            finally:
                self.now -= taken

        scripted.service.get = get


async def test_reads_by_name_stay_within_the_byte_budget(scripted: ScriptedService) -> None:
    """Also when objects become large after many small ones have made the estimate small."""
    store = scripted.new_store(
        max_in_flight=16, max_in_flight_bytes=64_000, range_size_bytes=16_000
    )
    for at in range(200):
        scripted.put(f"small {at}", pattern(100))
    for at in range(40):
        scripted.put(f"large {at}", pattern(15_000 + 500 * at))
    peak = PeakBytes(scripted)
    await asyncio.gather(*(store.get(f"small {at}") for at in range(200)))
    assert store.session.unknown_size.num_bytes < 1000
    got = await asyncio.gather(*(store.get(f"large {at}") for at in range(40)))
    assert [len(each) for each in got] == [15_000 + 500 * at for at in range(40)]
    assert 32_000 < peak.peak <= 64_000


@pytest.mark.parametrize(("estimate", "expected"), [(1000, 2 * MIB), (8 * MIB, 10 * MIB)])
async def test_small_objects_do_not_wait_for_each_other(
    scripted: ScriptedService, estimate: int, expected: int
) -> None:
    options = {"max_in_flight_bytes": 256 * MIB, "range_size_bytes": 16 * MIB}
    store = scripted.new_store(max_in_flight=64, **options)
    store.session.unknown_size.add(estimate)
    scripted.put("a", DATA)
    asked: list[int] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        asked.append(request.end)
        return await inner(request, **settings)

    scripted.service.get = get
    await store.get("a")
    assert asked == [expected]


# --- on the wire ---------------------------------------------------------------------------

SIZE = 3 * MIB


@pytest.fixture(scope="module")
def running() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture
def server(running: GCSServer) -> Iterator[GCSServer]:
    running.put("bucket", "a", pattern(SIZE))
    yield running
    running.faults.clear()


@asynccontextmanager
async def opened(
    server: GCSServer, *, progress_seconds: float = 100, **options: Any
) -> AsyncIterator[aioflux.Store]:
    transfer = aioflux.TransferOptions(
        **{"range_size_bytes": 8 * MIB, "verify_ranges": False, **options}
    )
    retry = aioflux.RetryPolicy(initial_seconds=0.01)
    timeouts = aioflux.Timeouts(progress_seconds=progress_seconds)
    async with aioflux.open_store(
        "gs://bucket", endpoint_url=server.url, transfer=transfer, retry=retry, timeouts=timeouts
    ) as store:
        yield store


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110  the server's thread brings it about
            await asyncio.sleep(0.01)


async def read_all(store: aioflux.Store) -> bytes:
    async with store.open_reader("a") as reader:
        return await reader.read()


async def get_into(store: aioflux.Store) -> bytes:
    buffer = bytearray(SIZE)
    assert await store.get_into("a", buffer) == SIZE
    return bytes(buffer)


CALLS = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", start=0, end=SIZE),
    "get_into": get_into,
    "open_reader": read_all,
}
BREAKS: dict[str, dict[str, Any]] = {
    "close": {"truncate_at": MIB},
    "reset": {"truncate_at": MIB, "reset": True},
    "stall": {"stall_at": MIB},
}


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("call", CALLS)
async def test_only_the_missing_bytes_are_requested_again(
    server: GCSServer, call: str, kind: str
) -> None:
    async with opened(server, progress_seconds=0.3 if kind == "stall" else 100) as store:
        server.faults.add("objects.media", times=1, **BREAKS[kind])
        server.stats.reset()
        assert await CALLS[call](store) == pattern(SIZE)
    media = server.stats.operation("objects.get")
    # A reset takes back what the client's kernel holds unread of the first MiB.
    assert media.bytes_out <= SIZE + (MIB if kind == "reset" else 1000)
    assert server.faults.injected.total() == 1


@pytest.mark.parametrize("call", CALLS)
async def test_an_overwrite_behind_a_break_gives_one_generation(
    server: GCSServer, call: str
) -> None:
    changed = pattern(SIZE, seed=9)
    async with opened(server, progress_seconds=0.3) as store:
        server.faults.add("objects.media", times=1, stall_at=MIB)
        reading = asyncio.create_task(CALLS[call](store))
        await until(lambda: server.faults.injected.total() > 0)
        server.put("bucket", "a", changed)
        if call == "open_reader":
            with pytest.raises(NotFoundError):
                await reading
        else:
            assert await reading == changed


@pytest.mark.parametrize("call", ["get_range", "get_into"])
async def test_a_flipped_byte_over_plain_http_is_mended(server: GCSServer, call: str) -> None:
    start, end = MIB, 2 * MIB
    async with opened(server, verify_ranges=True) as store:
        server.faults.add("objects.media", times=1, flip_at=77)
        if call == "get_range":
            got = await store.get_range("a", start=start, end=end)
        else:
            buffer = bytearray(end - start)
            await store.get_into("a", buffer, start=start)
            got = bytes(buffer)
    assert got == pattern(SIZE)[start:end]


async def test_an_empty_object_is_read_with_its_metadata(server: GCSServer) -> None:
    """A range of an empty object is unsatisfiable, and its metadata is asked for by itself."""
    server.put("bucket", "a", b"")
    async with opened(server) as store:
        [[(meta, data)]] = [batch async for batch in store.fetch_batches(["a"])]
    assert (meta.key, meta.size, data) == ("a", 0, b"")
    assert meta.generation


async def test_an_empty_object_that_is_filled_while_it_is_read_is_read_anew(
    scripted: ScriptedService,
) -> None:
    scripted.put("a", DATA)
    inner = scripted.service.get
    empty = Body(data=b"", size=0, generation="", crc32c=0, meta=lambda: None)
    answers = [empty]

    async def get(request: ReadRequest, **settings: Any) -> Body:
        return answers.pop() if answers else await inner(request, **settings)

    scripted.service.get = get
    assert await scripted.store.get("a") == DATA


# --- streams -------------------------------------------------------------------------------


async def test_an_idle_reader_fetches_no_more_than_its_window(
    server: GCSServer,
) -> None:
    server.put("bucket", "large", bytes(64 * MIB))
    options = {"range_size_bytes": 4 * MIB, "max_buffered_bytes": 16 * MIB, "part_size_bytes": PART}
    async with opened(server, **options) as store:
        server.stats.reset()
        async with store.open_reader("large") as reader:
            await reader.read(1)
            session: Any = store._sessions.current()
            await until(lambda: session.admission.bytes.held_bytes == 0)
            assert server.stats.operation("objects.get").bytes_out <= 16 * MIB + 10_000


def small_window(scripted: ScriptedService, **options: Any) -> aioflux.Store:
    return scripted.new_store(range_size_bytes=PART, max_buffered_bytes=2 * PART, **options)


LONG = pattern(4 * PART + 1000)


async def test_after_a_jump_every_range_is_sure(plain: ScriptedService) -> None:
    meta = plain.put("a", LONG)
    async with small_window(plain).open_reader(meta) as reader:
        reader.seek(2 * PART)
        plain.service.fail("get", Fault(kind="flip", num_bytes=3))
        assert await reader.read(PART) == LONG[2 * PART : 3 * PART]
        plain.service.fail("get", *[Fault(kind="flip", num_bytes=at) for at in (0, 3, 6)])
        with pytest.raises(ChecksumError, match="three different contents"):
            await reader.read(PART)


async def test_a_verified_object_may_be_read_again_at_any_place(plain: ScriptedService) -> None:
    meta = plain.put("a", LONG)
    async with small_window(plain).open_reader(meta) as reader:
        assert await reader.read() == LONG
        count = plain.service.count("get")
        reader.seek(0)
        plain.service.fail("get", Fault(kind="flip", num_bytes=3))
        assert await reader.read(9) == LONG[:9]
        assert plain.service.count("get") <= count + 3


async def test_a_range_larger_than_the_buffer_is_cut(scripted: ScriptedService) -> None:
    meta = scripted.put("a", LONG)
    store = scripted.new_store(range_size_bytes=100 * MIB, max_buffered_bytes=PART)
    asked: list[int] = []
    inner = scripted.service.get

    async def get(request: ReadRequest, **settings: Any) -> Any:
        asked.append(request.end - request.start)
        return await inner(request, **settings)

    scripted.service.get = get
    async with store.open_reader(meta) as reader:
        assert await reader.read() == LONG
    assert max(asked) == PART
