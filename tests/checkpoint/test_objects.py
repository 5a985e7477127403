"""Data objects: written from where memory lies, and read back by verified ranges."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux import CheckpointCorruptError
from aioflux._values.checksums import crc32c
from aioflux.checkpoint._store.objects import (
    BlockDigest,
    open_checkpoint,
    read_range,
    verify_blocks,
    write_object,
)
from aioflux.testing import GCSServer

KIB = 1024
BLOCK = 64 * KIB
DATA = random.Random(5).randbytes(11 * BLOCK + 17)


@pytest.fixture(scope="module")
def server():
    with GCSServer() as running:
        running.create_bucket("objects")
        yield running


@pytest.fixture
async def store(server):
    prefix = f"gs://objects/{random.randrange(1 << 40):x}"
    async with open_checkpoint(prefix, endpoint_url=server.url) as opened:
        yield opened


async def save(store, data=DATA):
    view = memoryview(data)
    return await write_object(store, "a/__0_0.distcp", [view[:100], b"", view[100:]], rank=3)


def at(stored, **changes):
    return msgspec.structs.replace(stored, **changes)


@given(
    st.binary(max_size=500),
    st.lists(st.integers(0, 500), max_size=6),
    st.integers(1, 64),
)
def test_a_digest_does_not_depend_on_the_pieces(data, cuts, block_size):
    digest = BlockDigest(block_size)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        digest.update(memoryview(data)[start:end])
    whole, blocks = digest.finish()
    assert whole == crc32c(data)
    assert blocks == b"".join(
        crc32c(data[start : start + block_size]).to_bytes(4)
        for start in range(0, len(data), block_size)
    )


async def test_an_object_is_told_as_it_is(store):
    seen = []
    stored = await write_object(store, "k", [DATA], rank=3, progress=seen.append)
    meta = await store.head("k")
    assert (stored.size, stored.crc32c, stored.generation) == (
        meta.size,
        meta.crc32c,
        meta.generation,
    )
    assert stored.rank == 3
    assert sum(seen) == len(DATA)
    assert verify_blocks(stored, 0, memoryview(DATA)) is None


async def test_segments_may_come_one_by_one(store):
    async def segments():
        for start in range(0, len(DATA), 1000):
            yield DATA[start : start + 1000]

    stored = await write_object(store, "k", segments())
    assert stored.crc32c == crc32c(DATA)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (0, len(DATA)),
        (0, 1),
        (5, 5),
        (BLOCK, 2 * BLOCK),
        (BLOCK - 1, BLOCK + 1),
        (3, 9 * BLOCK + 5),
        (3, 9 * BLOCK),
        (BLOCK, 9 * BLOCK + 5),
        (len(DATA) - 3, len(DATA)),
        (7, len(DATA)),
        (BLOCK * 11, len(DATA)),
    ],
)
async def test_any_range_comes_back_for_two_blocks_more_at_most(server, store, start, end):
    stored = await save(store)
    memory = bytearray(end - start)
    server.stats.reset()
    await read_range(store, stored, start=start, into=memoryview(memory))
    assert memory == DATA[start:end]
    assert server.stats.total.bytes_out <= (end - start) + 2 * BLOCK
    assert server.stats.total.requests <= 1


@pytest.mark.parametrize("at_byte", [0, BLOCK - 1, 5 * BLOCK, len(DATA) - 1])
async def test_a_flipped_bit_is_told(store, at_byte):
    stored = await save(store)
    damaged = bytearray(DATA)
    damaged[at_byte] ^= 4
    meta = await store.put(stored.key, damaged)
    stored = at(stored, generation=meta.generation)
    with pytest.raises(CheckpointCorruptError, match="not those that were saved"):
        await read_range(store, stored, start=0, into=memoryview(bytearray(len(DATA))))


async def test_a_flip_on_the_way_is_read_again(server, store):
    stored = await save(store)
    memory = bytearray(BLOCK)
    with server.faults.inject("objects.media", flip_at=5, times=2):
        await read_range(store, stored, start=BLOCK, into=memoryview(memory))
    assert memory == DATA[BLOCK : 2 * BLOCK]


async def test_what_was_replaced_is_not_read(store):
    stored = await save(store)
    await store.put(stored.key, DATA)
    with pytest.raises(CheckpointCorruptError, match="was deleted or replaced"):
        await read_range(store, stored, start=0, into=memoryview(bytearray(9)))


async def test_a_copy_is_read_by_its_blocks_alone(store):
    stored = await save(store)
    await store.put(stored.key, DATA)
    memory = bytearray(9)
    await read_range(store, stored, start=0, into=memoryview(memory), is_pinned=False)
    assert memory == DATA[:9]


async def test_what_is_gone_is_told(store):
    stored = await save(store)
    await store.delete(stored.key)
    with pytest.raises(CheckpointCorruptError, match="was deleted or replaced"):
        await read_range(store, stored, start=0, into=memoryview(bytearray(9)))


async def test_what_was_cut_off_is_told(store):
    stored = await save(store)
    meta = await store.put(stored.key, DATA[:-BLOCK])
    stored = at(stored, generation=meta.generation)
    with pytest.raises(CheckpointCorruptError):
        await read_range(store, stored, start=0, into=memoryview(bytearray(len(DATA))))


async def test_a_range_beyond_the_end_is_refused(store):
    stored = await save(store)
    with pytest.raises(CheckpointCorruptError, match="contradicts"):
        await read_range(store, stored, start=len(DATA), into=memoryview(bytearray(1)))


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_other_stores(scheme, tmp_path):
    root = f"file://{tmp_path}" if scheme == "file" else "memory://objects-other"
    async with aioflux.open_store(root) as store:
        stored = await save(store)
        memory = bytearray(2 * BLOCK)
        await read_range(store, stored, start=7, into=memoryview(memory))
        assert memory == DATA[7 : 7 + 2 * BLOCK]
