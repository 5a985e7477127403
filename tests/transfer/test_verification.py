"""Which received bytes were verified, and what a store tells of those that were wrong or unsure."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import ChecksumError
from aioflux.testing.faults import Fault
from tests.transfer.clock import loop_time
from tests.transfer.fake_service import FakeService, Reading, settle
from tests.transfer.scripted_service import ScriptedService, pattern

if TYPE_CHECKING:
    from aioflux import Store
    from aioflux._services.base import Body, ReadRequest
    from tests.transfer.clock import Clock

SMALL, LARGE = pattern(500), pattern(4500)  # one range, and five
FLIP = Fault(kind="flip", num_bytes=3)


async def get(store: Store) -> bytes:
    return await store.get("a")


async def get_into(store: Store) -> bytes:
    buffer = bytearray(5000)
    return bytes(buffer[: await store.get_into("a", buffer)])


async def get_all_by_range(store: Store) -> bytes:
    return await store.get_range("a", start=0, end=5000)


async def get_many(store: Store) -> bytes:
    [(_, data)] = [pair async for pair in store.get_many(["a"])]
    return data


async def get_part(store: Store) -> bytes:
    return await store.get_range("a", start=10, end=400)


async def get_parts(store: Store) -> bytes:
    return b"".join(await store.get_ranges("a", [(10, 200), (200, 400)]))


async def get_part_into(store: Store) -> bytes:
    buffer = bytearray(390)
    await store.get_into("a", buffer, start=10)
    return bytes(buffer)


async def read(store: Store) -> bytes:
    async with store.open_reader("a") as reader:
        return await reader.read()


WHOLE = {each.__name__: each for each in (get, get_into, get_all_by_range, get_many, read)}
PARTS = {each.__name__: each for each in (get_part, get_parts, get_part_into)}
each_whole = pytest.mark.parametrize("operation", WHOLE.values(), ids=WHOLE)
each_part = pytest.mark.parametrize("operation", PARTS.values(), ids=PARTS)
each_size = pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])


def declare(scripted: ScriptedService, **declared: Any) -> None:
    scripted.service.capabilities = replace(scripted.service.capabilities, **declared)


def strip_checksums(scripted: ScriptedService, *, is_verified: bool = False) -> None:
    """Remove the checksum of each response to a read, as a proxy may do."""
    inner = scripted.service.get

    async def stripped(request: ReadRequest, **settings: Any) -> Body:
        body = await inner(request, **settings)
        return replace(body, crc32c=None, is_verified=is_verified)

    scripted.service.get = stripped


def forget_checksum(scripted: ScriptedService) -> None:
    """Let the service itself have no checksum of the object."""
    kept = scripted.bucket.objects["a"]
    scripted.bucket.objects["a"] = replace(kept, meta=replace(kept.meta, crc32c=None))


# --- a checksum that is lost on the way ------------------------------------------------------


@each_size
@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("operation", [get, get_into, get_all_by_range, get_many])
async def test_a_lost_checksum_is_requested(
    scripted: ScriptedService, operation: Any, data: bytes, *, is_warm: bool
) -> None:
    """A wrong byte is found nevertheless, although TLS is trusted, and each byte is read once."""
    scripted.put("a", data)
    if is_warm:
        await operation(scripted.store)
    scripted.service.calls.clear()
    strip_checksums(scripted)
    assert await operation(scripted.store) == data
    assert scripted.service.count("head") == 1
    num_gets = scripted.service.count("get")
    scripted.service.fail("get", FLIP)
    assert await operation(scripted.store) == data
    assert scripted.service.count("get") > 2 * num_gets
    assert scripted.store.stats.bytes_unverified == 0


async def test_a_missing_checksum_is_not_requested_if_an_object_may_have_none(
    scripted: ScriptedService,
) -> None:
    """As on S3, whose responses to whole objects contain the checksum if there is one."""
    scripted.put("a", SMALL)
    declare(scripted, listed_checksums=False)
    strip_checksums(scripted)
    assert await scripted.store.get("a") == SMALL
    assert scripted.service.count("head") == 0


# --- bytes that nothing vouches for ----------------------------------------------------------


@each_size
@each_whole
@pytest.mark.parametrize("guarded", [True, False], ids=["tls", "http"])
async def test_an_object_without_a_checksum_is_unverified(
    scripted: ScriptedService, operation: Any, data: bytes, *, guarded: bool
) -> None:
    """Neither TLS nor a second read tells what was stored."""
    scripted.put("a", data)
    forget_checksum(scripted)
    declare(scripted, guarded_transport=guarded)
    for store in (scripted.store, scripted.new_store(verify_ranges=True)):
        assert await operation(store) == data
        assert store.stats.bytes_unverified == len(data)


@each_whole
async def test_an_object_with_a_checksum_is_verified(
    scripted: ScriptedService, operation: Any
) -> None:
    scripted.put("a", LARGE)
    store = scripted.new_store(verify_ranges=False)
    declare(scripted, guarded_transport=False)
    assert await operation(store) == LARGE
    assert store.stats.bytes_unverified == 0


@pytest.mark.parametrize("operation", [get, get_into, get_all_by_range, get_many])
async def test_an_object_that_the_service_module_has_verified_is_verified(
    scripted: ScriptedService, operation: Any
) -> None:
    """As by the MD5 of Azure."""
    scripted.put("a", SMALL)
    declare(scripted, checksums=False)
    strip_checksums(scripted, is_verified=True)
    assert await operation(scripted.store) == SMALL
    assert scripted.store.stats.bytes_unverified == 0


@each_part
@pytest.mark.parametrize(
    ("verify_ranges", "guarded", "num_bytes"),
    [(True, True, 0), (True, False, 0), (False, False, 390), (False, True, 0)],
)
async def test_a_range_is_unverified_if_it_is_read_once_over_plain_http(
    scripted: ScriptedService, operation: Any, verify_ranges: Any, num_bytes: int, *, guarded: bool
) -> None:
    scripted.put("a", LARGE)
    declare(scripted, guarded_transport=guarded)
    store = scripted.new_store(verify_ranges=verify_ranges)
    assert await operation(store) == LARGE[10:400]
    assert store.stats.bytes_unverified == num_bytes


async def test_what_a_reader_returned_once_over_plain_http_is_unverified(
    scripted: ScriptedService,
) -> None:
    scripted.put("a", LARGE)
    declare(scripted, guarded_transport=False)
    store = scripted.new_store(verify_ranges=False)
    async with store.open_reader("a", read_ahead_bytes=2000) as reader:
        await reader.read(1500)
    assert store.stats.bytes_unverified == 2000, "two ranges of 1000 bytes"


@each_size
@each_whole
async def test_without_verify_everything_is_unverified(
    scripted: ScriptedService, operation: Any, data: bytes
) -> None:
    scripted.put("a", data)
    store = scripted.new_store(verify=False)
    assert await operation(store) == data
    assert store.stats.bytes_unverified == len(data)


# --- wrong bytes ------------------------------------------------------------------------------


@each_size
@each_whole
async def test_wrong_bytes_are_a_warning_and_are_counted(
    scripted: ScriptedService, operation: Any, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    meta = scripted.put("a", data)
    scripted.service.fail("get", FLIP)
    with caplog.at_level(logging.WARNING, "aioflux"):
        assert await operation(scripted.store) == data
    stats = scripted.store.stats
    assert stats.num_checksum_mismatches == 1
    assert stats.bytes_received >= len(data) + min(1000, len(data)), "of all attempts"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"wrong bytes of {meta.uri} were received" in record.getMessage()


async def test_wrong_bytes_of_a_small_read_without_a_task_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeService("wrong-bytes")
    fake.store("a", SMALL)
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a", change=lambda body: replace(body, data=bytes(len(SMALL))))
    await reading.task
    assert reading.got == [("a", SMALL)]
    stats = reading.store.stats
    assert (stats.num_checksum_mismatches, stats.bytes_received) == (1, 2 * len(SMALL))
    assert (stats.latency.count, stats.call_latency.count) == (2, 1)
    assert "wrong bytes" in caplog.text


async def test_wrong_bytes_of_a_range_are_counted(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.put("a", LARGE)
    declare(scripted, guarded_transport=False)
    scripted.service.fail("get", FLIP)
    store = scripted.new_store(verify_ranges=True)
    assert await get_part(store) == LARGE[10:400]
    assert store.stats.num_checksum_mismatches == 1
    assert "wrong bytes" in caplog.text


async def test_bytes_that_do_not_match_another_checksum_are_counted(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    """As the MD5 of Azure, which the service module compares. None of them is kept."""
    meta = scripted.put("a", LARGE)
    error = aioflux.TransientError(
        "the MD5 differs", uri=meta.uri, num_bytes_received=len(LARGE), is_damaged=True
    )
    scripted.service.fail("get", Fault(kind="lose", error=error))
    store = scripted.new_store(range_size_bytes=10_000)
    buffer = bytearray(len(LARGE))
    assert await store.get_into(meta, buffer) == len(LARGE)
    assert buffer == LARGE
    stats = store.stats
    assert (stats.num_checksum_mismatches, stats.num_retries) == (1, 1)
    assert stats.bytes_received == 2 * len(LARGE)
    assert "wrong bytes" in caplog.text


async def test_each_wrong_read_counts(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.put("a", SMALL)
    scripted.service.fail("get", *[FLIP] * 3)
    with pytest.raises(ChecksumError):
        await scripted.store.get("a")
    assert scripted.store.stats.num_checksum_mismatches == 3
    assert len(caplog.records) == 3


# --- the latency of calls ----------------------------------------------------------------------


class Slow:
    """A service whose every request takes a second of the loop's clock."""

    def __init__(self, scripted: ScriptedService, clock: Clock) -> None:
        for name in ("get", "head", "put", "copy", "compose", "delete"):
            inner = getattr(scripted.service, name)

            async def slow(*args: Any, inner: Any = inner, **settings: Any) -> Any:
                clock.now += 1.0
                return await inner(*args, **settings)

            setattr(scripted.service, name, slow)


async def test_a_call_takes_as_long_as_all_its_attempts(
    scripted: ScriptedService, clock: Clock
) -> None:
    """With the attempts that failed, the pauses and the reads that are repeated."""
    Slow(scripted, clock)
    scripted.put("a", SMALL)
    retry = aioflux.RetryPolicy(initial_seconds=4.0)
    store = scripted.new_store(retry=retry)
    scripted.service.fail("get", Fault(kind="refuse"), FLIP)
    started_at = loop_time()
    assert await store.get("a") == SMALL
    stats = store.stats
    assert stats.latency.count == 2
    assert stats.latency.total_seconds == 2.0
    assert stats.call_latency.count == 1
    assert stats.call_latency.total_seconds == loop_time() - started_at >= 3.0


CALLS: dict[str, Any] = {
    **WHOLE,
    **PARTS,
    "head": lambda store: store.head("a"),
    "put": lambda store: store.put("b", SMALL),
    "copy": lambda store: store.copy("a", "b"),
    "compose": lambda store: store.compose("b", ["a", "a"]),
    "delete": lambda store: store.delete("a"),
}
del CALLS["read"]  # a stream is no call


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_each_call_is_counted_once(
    scripted: ScriptedService, clock: Clock, call: Any
) -> None:
    Slow(scripted, clock)
    scripted.put("a", LARGE)
    started_at = loop_time()
    await call(scripted.store)
    calls = scripted.store.stats.call_latency
    assert calls.count == 1
    assert calls.total_seconds == loop_time() - started_at


@pytest.mark.usefixtures("clock")
async def test_a_small_read_of_many_is_a_call() -> None:
    fake = FakeService("calls")
    for key in "abc":
        fake.store(key, SMALL)
    reading = Reading(fake.open(), ["a", "b", "c"])
    await settle()
    fake.answer("a")
    fake.refuse("b", aioflux.TransientError("no"))
    fake.answer("c")
    await reading.task
    stats = reading.store.stats
    assert (stats.num_requests, stats.latency.count, stats.call_latency.count) == (4, 3, 3)
