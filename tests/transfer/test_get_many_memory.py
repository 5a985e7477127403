"""Memory of reading many objects: what is in flight and what waits for the consumer, together."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import TYPE_CHECKING, Any, Self

import pytest

import aioflux
from aioflux.testing import GCSServerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.more

MIB = 1024 * 1024
BUDGET = 32 * MIB
NUM_OBJECTS_BYTES = 96 * MIB
SLACK = 2 * MIB
"""For all that is no body: tasks, keys, threads."""
TRANSFER = aioflux.TransferOptions(max_in_flight=32, max_in_flight_bytes=BUDGET)
WORK_SECONDS = 0.002
"""Time that the consumer takes for each object, while others arrive."""


async def each_of_get_many(store: aioflux.Store, keys: Any, ordered: bool) -> AsyncIterator[int]:
    async for _, data in store.get_many(keys, ordered=ordered):
        yield len(data)


async def each_of_get_batches(store: aioflux.Store, keys: Any, ordered: bool) -> AsyncIterator[int]:
    async for batch in store.get_batches(keys, ordered=ordered):
        for _, data in batch:
            yield len(data)


async def each_of_fetch_batches(
    store: aioflux.Store, keys: Any, ordered: bool
) -> AsyncIterator[int]:
    async for batch in store.fetch_batches(keys, ordered=ordered):
        for _, data in batch:
            yield len(data)


async def each_tried(store: aioflux.Store, keys: Any, ordered: bool) -> AsyncIterator[int]:
    async for batch in store.try_fetch_batches(keys, ordered=ordered):
        for _, data in batch:
            assert isinstance(data, bytes)
            yield len(data)


ASYNC_READS = [each_of_get_many, each_of_get_batches, each_of_fetch_batches, each_tried]


def each_of_sync_get_many(store: aioflux.sync.Store, keys: Any) -> Iterator[int]:
    for _, data in store.get_many(keys):
        yield len(data)


def each_of_sync_get_batches(store: aioflux.sync.Store, keys: Any) -> Iterator[int]:
    for batch in store.get_batches(keys):
        for _, data in batch:
            yield len(data)


def each_of_sync_fetch_batches(store: aioflux.sync.Store, keys: Any) -> Iterator[int]:
    for batch in store.try_fetch_batches(keys):
        for _, data in batch:
            assert isinstance(data, bytes)
            yield len(data)


class Peak:
    """The most memory that was allocated meanwhile, in bytes."""

    def __enter__(self) -> Self:
        gc.collect()
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.num_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def fill(directory: Path, size: int) -> str:
    """Store zeros, which take no room on the disk."""
    for at in range(NUM_OBJECTS_BYTES // size):
        with (directory / f"{at:03}").open("wb") as file:
            file.truncate(size)
    return f"file://{directory}/"


of_sizes = pytest.mark.parametrize("size", [2 * MIB, 5 * MIB], ids=["2M", "5M"])


@of_sizes
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "as they come"])
@pytest.mark.parametrize("named", [True, False], ids=["names", "metas"])
@pytest.mark.parametrize("read", ASYNC_READS)
async def test_results_that_wait_and_bytes_in_flight_stay_within_the_budget(
    tmp_path: Path, read: Any, size: int, *, named: bool, ordered: bool
) -> None:
    """Beyond it are the object (of small ones, the batch) that the consumer holds, and one more."""
    count = 0
    async with aioflux.open_store(fill(tmp_path, size), transfer=TRANSFER) as store:
        metas = await store.list_all()
        keys = [meta.key for meta in metas] if named else metas
        with Peak() as peak:
            async for num_bytes in read(store, keys, ordered):
                assert num_bytes == size
                count += 1
                await asyncio.sleep(WORK_SECONDS)
    assert count == len(keys)
    assert peak.num_bytes / MIB <= (BUDGET + max(size, BUDGET // 16) + size + SLACK) / MIB


@of_sizes
@pytest.mark.parametrize(
    "read", [each_of_sync_get_many, each_of_sync_get_batches, each_of_sync_fetch_batches]
)
def test_so_they_do_for_a_blocking_consumer(tmp_path: Path, read: Any, size: int) -> None:
    count = 0
    with aioflux.sync.open_store(fill(tmp_path, size), transfer=TRANSFER) as store:
        keys = store.list_all()
        with Peak() as peak:
            for num_bytes in read(store, keys):
                assert num_bytes == size
                count += 1
                time.sleep(WORK_SECONDS)
    assert count == len(keys)
    assert peak.num_bytes / MIB <= (BUDGET + max(size, BUDGET // 16) + size + SLACK) / MIB


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServerProcess]:
    """A server whose memory is not counted, with three objects larger than the budget."""
    with GCSServerProcess(buckets=["bucket"]) as process:
        with aioflux.sync.open_store("gs://bucket/", endpoint_url=process.url) as store:
            for number in range(3):
                store.put(f"large/{number}", bytes(BUDGET + MIB))
        yield process


@pytest.mark.parametrize("named", [True, False], ids=["names", "metas"])
@pytest.mark.parametrize("face", ["get_many", "get_batches", "fetch_batches", "try_fetch_batches"])
@pytest.mark.parametrize("is_sync", [True, False], ids=["blocking", "asynchronous"])
async def test_an_object_larger_than_the_budget_is_read_alone(
    server: GCSServerProcess, face: str, *, is_sync: bool, named: bool
) -> None:
    """Nothing else holds the one before, which the consumer has dropped by then.

    Not of files: the thread that has read one may hold it for a moment longer.
    """
    size = BUDGET + MIB
    where: dict[str, Any] = {"endpoint_url": server.url, "transfer": TRANSFER}

    async def read() -> None:
        async with aioflux.open_store("gs://bucket/", **where) as store:
            metas = await store.list_all("large/")
            async for results in getattr(store, face)(keys_of(metas)):
                del results

    def read_blocking() -> None:
        with aioflux.sync.open_store("gs://bucket/", **where) as store:
            metas = store.list_all("large/")
            for results in getattr(store, face)(keys_of(metas)):
                del results

    def keys_of(metas: Any) -> Any:
        return [meta.key for meta in metas] if named else metas

    with Peak() as peak:
        if is_sync:
            await asyncio.to_thread(read_blocking)
        else:
            await read()
    assert peak.num_bytes / MIB <= (size + SLACK) / MIB


async def test_composites_fit_the_budget_with_the_objects_that_are_cut_out_of_them() -> None:
    """Beyond it is one composite, which takes half of it at most, while it is cut."""
    size, count, num_read = 3 * MIB // 2, 64, 0
    with GCSServerProcess(buckets=["bucket"]) as server:
        async with aioflux.open_store(
            "gs://bucket/", endpoint_url=server.url, transfer=TRANSFER
        ) as store:
            for number in range(count):
                await store.put(f"{number:02}", bytes(size))
            metas = await store.list_all()
            with Peak() as peak:
                async for batch in store.fetch_composed(metas):
                    num_read += len(batch)
                    del batch
    assert num_read == count
    assert peak.num_bytes / MIB <= (BUDGET + BUDGET // 2 + SLACK) / MIB
