"""Statistics of a store whose requests fail on the embedded server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("HTTP 503", {"status": 503}),
        ("lost connection", {"truncate_at": 100}),
        ("stalled", {"stall_at": 100}),
    ],
)
@pytest.mark.parametrize("is_batch", [False, True], ids=["get", "get_many"])
async def test_failures_are_counted_by_cause(
    cause: str, fault: dict[str, Any], is_batch: bool
) -> None:
    timeouts = aioflux.Timeouts(progress_seconds=0.5)
    with GCSServer(buckets=["bucket"]) as server:
        async with aioflux.open_store(
            "gs://bucket", endpoint_url=server.url, timeouts=timeouts
        ) as store:
            await store.put("a", bytes(1000))
            server.faults.add("*objects.get", times=1, **fault)
            if is_batch:
                assert [len(data) async for _, data in store.get_many(["a"])] == [1000]
            else:
                assert len(await store.get("a")) == 1000
            stats = store.stats
    assert stats.failures == {cause: 1}
    assert f"(failures: 1 x {cause})" in str(stats)
    assert 0 < stats.seconds < 60


READS: dict[str, Callable[[aioflux.Store, str], Awaitable[Any]]] = {
    "head": lambda store, key: store.head(key),
    "get": lambda store, key: store.get(key),
    "get_into": lambda store, key: store.get_into(key, bytearray(1000)),
    "get_range": lambda store, key: store.get_range(key, 5, 10),
    "get_ranges": lambda store, key: store.get_ranges(key, [(5, 10), (20, 30)]),
}


@pytest.mark.parametrize("operation", READS)
async def test_the_slowest_call_is_named(operation: str) -> None:
    with GCSServer(buckets=["bucket"]) as server:
        async with aioflux.open_store("gs://bucket/x", endpoint_url=server.url) as store:
            assert store.stats.slowest_call_uri == ""
            for key in ("a", "b", "c"):
                await store.put(key, bytes(1000))
            server.faults.add("*objects.get", times=1, delay_seconds=0.5, key="x/b")
            for key in ("a", "b", "c"):
                await READS[operation](store, key)
            stats = store.stats
    assert stats.slowest_call_uri == "gs://bucket/x/b"
    assert 0.5 <= stats.slowest_call_seconds <= stats.call_latency.quantile(1.0)
    assert str(stats).splitlines()[-1].endswith(" s, gs://bucket/x/b")


async def test_the_slowest_of_many_is_named() -> None:
    """Also of objects that are read by callbacks."""
    keys = [f"{number}.bin" for number in range(20)]
    with GCSServer(buckets=["bucket"]) as server:
        async with aioflux.open_store("gs://bucket", endpoint_url=server.url) as store:
            await store.put_many((key, bytes(1000)) for key in keys)
            for key, seconds in (("7.bin", 0.5), ("8.bin", 1.0)):
                server.faults.add("*objects.get", times=1, delay_seconds=seconds, key=key)
                assert len([key async for key, _ in store.get_many(keys)]) == 20
                stats = store.stats
                assert stats.slowest_call_uri == f"gs://bucket/{key}"
                assert stats.slowest_call_seconds >= seconds
