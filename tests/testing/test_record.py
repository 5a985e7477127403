"""`record` counts what all stores of the process send, by kind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import TransferOptions
from aioflux._services.base import Service
from aioflux.testing import GCSServer, record
from aioflux.testing.faults import Fault, FlakyStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.moto import Moto

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


def attributes() -> dict[type, dict[str, Any]]:
    """Return the attributes of all services."""
    found, classes = {}, [Service]
    while classes:
        each = classes.pop()
        found[each] = dict(vars(each))
        classes += each.__subclasses__()
    return found


async def test_kinds_and_bytes_of_an_asynchronous_store(server: GCSServer) -> None:
    async with aioflux.open_store("gs://bucket/async", endpoint_url=server.url) as store:
        before = server.stats.total.requests
        with record() as sent:
            await store.put_many((f"{n}.bin", bytes(1000)) for n in range(50))
            keys = [meta.key async for meta in store.list()]
            assert len([key async for key, _ in store.get_many(keys)]) == 50
            await store.head("0.bin")
            await store.copy("0.bin", "copy.bin")
        assert sent.kinds == {"put": 50, "list": 1, "get": 50, "head": 1, "copy": 1}
        assert sent.num_requests == server.stats.total.requests - before == 103
        assert (sent.bytes_sent, sent.bytes_received) == (50_000, 50_000)
        assert sent.num_requests == store.stats.num_requests
        await store.head("0.bin")
    assert sent.num_requests == 103


def test_a_blocking_store_that_is_opened_in_the_block(server: GCSServer) -> None:
    with (
        record() as sent,
        aioflux.sync.open_store("gs://bucket/sync", endpoint_url=server.url) as store,
    ):
        store.put("a.bin", b"hello")
        assert store.get("a.bin") == b"hello"
    assert sent.kinds == {"put": 1, "get": 1}


def test_an_epoch_has_the_requests_of_its_objects(server: GCSServer) -> None:
    from aioflux.data import MapDataset

    for number in range(10):
        server.put("bucket", f"epoch/{number}.bin", b"x")
    with record() as sent:
        dataset = MapDataset("gs://bucket/epoch", endpoint_url=server.url)
        assert len([dataset[index] for index in range(len(dataset))]) == 10
    assert sent.kinds == {"list": 1, "get": 10}


async def test_a_large_object_is_put_in_parts(server: GCSServer) -> None:
    transfer = TransferOptions(part_size_bytes=5 * MIB)
    async with aioflux.open_store(
        "gs://bucket/large", endpoint_url=server.url, transfer=transfer
    ) as store:
        with record() as sent:
            await store.put("a.bin", bytes(12 * MIB))
    assert sent.kinds == {"begin_upload": 1, "put_part": 3, "complete_upload": 1}
    assert sent.bytes_sent == 12 * MIB


async def test_each_attempt_counts(server: GCSServer) -> None:
    async with aioflux.open_store("gs://bucket/retry", endpoint_url=server.url) as store:
        await store.put("a.bin", b"hello")
        server.faults.add("objects.get", status=503, retry_after=0, times=2)
        with record() as sent:
            await store.get("a.bin")
    assert sent.kinds == {"get": 3}
    assert sent.bytes_received == 5


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_services_without_http(scheme: str, tmp_path: Path) -> None:
    uri = tmp_path.as_uri() if scheme == "file" else "memory://record"
    async with aioflux.open_store(uri) as store:
        with record() as sent:
            await store.put("a.bin", b"hello")
            await store.get("a.bin")
            await store.list_all()
    assert sent.kinds == {"put": 1, "get": 1, "list": 1}
    assert (sent.bytes_sent, sent.bytes_received) == (5, 5)


async def test_another_cloud(moto: Moto) -> None:
    access = aioflux.S3Access(credentials=lambda: ("AKIDEXAMPLE", "secret"), region="us-east-1")
    async with aioflux.open_store(
        "s3://bucket/record", credentials=access, endpoint_url=moto.url
    ) as store:
        with record() as sent:
            await store.put("a.bin", b"hello")
            await store.get("a.bin")
    assert sent.kinds == {"put": 1, "get": 1}


async def test_a_fault_that_sends_nothing_does_not_count() -> None:
    faults = [Fault(kind="refuse")]
    draw = lambda operation: faults.pop() if operation == "get" and faults else None  # noqa: E731
    async with FlakyStore("memory://record-flaky", draw=draw) as store:
        await store.put("a.bin", b"hello")
        with record() as sent:
            assert await store.get("a.bin") == b"hello"
    assert faults == []
    assert sent.kinds == {"get": 1}


async def test_records_may_overlap() -> None:
    async with aioflux.open_store("memory://record-overlap") as store:
        await store.put("a.bin", b"x")
        with record() as outer:
            await store.get("a.bin")
            with record() as inner:
                await asyncio.gather(store.get("a.bin"), store.head("a.bin"))
    assert (outer.kinds, inner.kinds) == ({"get": 2, "head": 1}, {"get": 1, "head": 1})


def test_a_record_leaves_nothing_behind() -> None:
    before = attributes()
    with record(), record():
        assert attributes() != before
    with pytest.raises(ZeroDivisionError), record():
        _ = 1 / 0
    assert attributes() == before
