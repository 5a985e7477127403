"""A zero-copy writer: memory in many pieces, sent without a copy."""

from __future__ import annotations

import random
import tracemalloc

import pytest

import aioflux
from aioflux import TransferOptions, TransientError
from aioflux.testing import GCSServer

MIB = 1024 * 1024
SMALL_PARTS = TransferOptions(
    part_size_bytes=5 * MIB, max_in_flight_bytes=12 * MIB, max_buffered_bytes=10 * MIB
)


@pytest.fixture(scope="module")
def server():
    with GCSServer() as running:
        yield running


@pytest.fixture(params=["gs", "memory", "file"])
def uri(request, server, tmp_path):
    match request.param:
        case "gs":
            bucket = f"borrow-{random.randrange(1 << 40):x}"
            server.create_bucket(bucket)
            return f"gs://{bucket}/"
        case "memory":
            return f"memory://borrow-{random.randrange(1 << 40):x}/"
        case _:
            return f"file://{tmp_path}/"


def open_store(uri, server, **options):
    extra = {"endpoint_url": server.url} if uri.startswith("gs") else {}
    return aioflux.open_store(uri, **extra, **options)


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [3],
        [5 * MIB],
        [5 * MIB, 1],
        [1] * 50,
        pytest.param([1] * 3000, id="3000 pieces"),
        [7 * MIB, 13, 0, 21 * MIB, 5],
        [2 * MIB] * 9,
    ],
    ids=str,
)
async def test_the_object_is_what_was_written(uri, server, sizes):
    pieces = [random.randbytes(size) for size in sizes]
    async with open_store(uri, server, transfer=SMALL_PARTS) as store:
        async with store.open_writer("a", zero_copy=True) as writer:
            for piece in pieces:
                assert await writer.write(piece) == len(piece)
            assert writer.tell() == sum(sizes)
        assert writer.meta.size == sum(sizes)
        assert await store.get("a") == b"".join(pieces)


async def write(store, *pieces, error=None, **settings):
    async with store.open_writer("a", zero_copy=True, **settings) as writer:
        for piece in pieces:
            await writer.write(piece)
        if error is not None:
            raise error


async def test_an_exception_publishes_nothing(uri, server):
    async with open_store(uri, server, transfer=SMALL_PARTS) as store:
        with pytest.raises(ZeroDivisionError):
            await write(store, bytes(11 * MIB), error=ZeroDivisionError())
        assert [meta.key async for meta in store.list()] == []
        assert (await store.clean(older_than_seconds=0, dry_run=True)).aborted == ()


async def test_a_precondition_holds(uri, server):
    async with open_store(uri, server, transfer=SMALL_PARTS) as store:
        await store.put("a", b"first")
        with pytest.raises(aioflux.AlreadyExistsError):
            await write(store, bytes(11 * MIB), mode="create")
        assert await store.get("a") == b"first"


async def test_memory_is_sent_from_where_it_is():
    """What changes before it was sent is what arrives: there is no copy."""
    async with aioflux.open_store("memory://borrowed/", transfer=SMALL_PARTS) as store:
        memory = bytearray(4 * MIB)
        async with store.open_writer("a", zero_copy=True) as writer:
            await writer.write(memory)
            memory[:] = b"x" * len(memory)
        assert await store.get("a") == bytes(memory)


async def test_an_object_of_one_part_is_sent_without_a_copy(tmp_path):
    memory = random.randbytes(4 * MIB)
    async with open_store(f"file://{tmp_path}/", None, transfer=SMALL_PARTS) as store:
        async with store.open_writer("a", zero_copy=True) as writer:
            for start in range(0, len(memory), MIB):
                await writer.write(memoryview(memory)[start : start + MIB])
            tracemalloc.start()
            try:
                await writer.aclose()
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert peak < MIB
        assert await store.get("a") == memory


async def test_a_part_that_cannot_be_stored_fails_the_writer(server):
    server.create_bucket("borrow-failing")
    retry = aioflux.RetryPolicy(max_attempts=1)
    async with open_store(
        "gs://borrow-failing/", server, transfer=SMALL_PARTS, retry=retry
    ) as store:
        server.faults.add("xml.multipart.part", status=503, times=1)
        with pytest.raises(TransientError):
            await write(store, *[bytes(3 * MIB)] * 12)
        assert [meta.key async for meta in store.list()] == []
        assert (await store.clean(older_than_seconds=0, dry_run=True)).aborted == ()


async def test_copies_may_be_changed_and_borrowed_memory_lies_between_them(uri, server):
    """In parts of 5 MiB, across their borders, with 10 MiB of copies at most on their way."""
    rng, expected = random.Random(0), []
    memory = bytearray(3 * MIB)
    async with open_store(uri, server, transfer=SMALL_PARTS) as store:
        async with store.open_writer("a", zero_copy=True) as writer:
            for number in range(8):
                borrowed = rng.randbytes(rng.choice((1, MIB, 6 * MIB)))
                await writer.write(borrowed)
                memory[:] = bytes([number]) * len(memory)
                assert await writer.write_copy(memory) == len(memory)
                expected += [borrowed, bytes(memory)]
        assert await store.get("a") == b"".join(expected)


async def test_a_large_copy_goes_through_small_memory(uri, server):
    data = random.randbytes(13 * MIB + 5)
    async with open_store(uri, server, transfer=SMALL_PARTS) as store:
        async with store.open_writer("a", zero_copy=True) as writer:
            assert await writer.write_copy(data) == len(data)
        assert await store.get("a") == data
        async with store.open_writer("b") as writer:
            await writer.write_copy(data)
        assert await store.get("b") == data
