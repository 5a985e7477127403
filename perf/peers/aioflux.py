"""aioflux: Store, with checksums, retries and limits enabled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import aioflux
from perf._meter import steady
from perf.peers._aioflux import store_options
from perf.peers._fresh import first_gets
from perf.peers._parts import each_range, one_by_one, part_size_bytes

if TYPE_CHECKING:
    from perf.work import Work


_FIRST_GET = """
import asyncio, sys
import aioflux

async def main(url, uri, bucket, key):
    async with aioflux.open_store(uri, endpoint_url=url) as store:
        print(len(await store.get(key)))

asyncio.run(main(*sys.argv[1:]))
"""


def _open(work: Work) -> aioflux.Store:
    part_size = part_size_bytes(work)
    return aioflux.open_store(
        work.uri(),
        **store_options(work),
        transfer=aioflux.TransferOptions(
            max_in_flight=work.in_flight,
            range_size_bytes=work.range_size_bytes,
            part_size_bytes=part_size,
            max_buffered_bytes=4 * part_size,
            num_loops=work.num_threads or 1,
            verify=work.peer != "aioflux_unverified",
        ),
    )


async def get_many(work: Work) -> int:
    async with _open(work) as store:

        async def read(work: Work) -> int:
            total = 0
            async for _, data in store.get_many(work.each_key(), ordered=False):
                total += len(data)
            return total

        return await steady(read, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, each in ranges, and return the bytes received."""
    async with _open(work) as store:

        async def read(key: str, _: Work) -> int:
            return len(await store.get(key))

        return await one_by_one(read, work)


async def get_into(work: Work) -> int:
    async with _open(work) as store:

        async def read(work: Work) -> int:
            buffer = bytearray(work.size_bytes)
            return sum([await store.get_into(key, buffer) for key in work.each_key()])

        return await steady(read, work)


async def get_range(work: Work) -> int:
    """Read each object in ranges, which are read once, and return the bytes received."""
    async with _open(replace(work, range_size_bytes=type(work).range_size_bytes)) as store:

        async def read(key: str, start: int, end: int) -> int:
            return len(await store.get_range(key, start, end))

        return await each_range(read, work)


async def list_all(work: Work) -> int:
    async with _open(work) as store:
        listing = await store.list_all(work.prefix)
        return sum(listing.sizes)


async def put_many(work: Work) -> int:
    body = work.body()
    async with _open(work) as store:

        async def write(work: Work) -> int:
            pairs = ((f"put/{key}", body) for key in work.each_key())
            return sum((await store.put_many(pairs)).sizes)

        return await steady(write, work)


async def put_one(work: Work) -> int:
    async with _open(work) as store:

        async def write(key: str, work: Work) -> int:
            return (await store.put(f"put/{key}", work.body())).size

        return await one_by_one(write, work)


async def first_get(work: Work) -> int:
    return first_gets(_FIRST_GET, work)
