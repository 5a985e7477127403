"""obstore (Rust): GCSStore, over the XML API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from obstore.store import GCSStore

from perf._meter import steady
from perf.peers._fresh import first_gets
from perf.peers._parts import each_range, fill, memory_of, one_by_one, part_size_bytes, put_into
from perf.work import bounded, state_key

if TYPE_CHECKING:
    from obstore.store import ClientConfig

    from perf.work import Work

_PIECE_BYTES = 1 << 20


_FIRST_GET = """
import sys
from obstore.store import GCSStore

url, uri, bucket, key = sys.argv[1:]
config = {"base_url": url, "bearer_token": "none", "skip_signature": True}
store = GCSStore(bucket, config=config, client_options={"allow_http": True})
print(len(store.get(key).bytes()))
"""


def open_store(work: Work) -> GCSStore:
    """Return a store of the bucket."""
    options: ClientConfig = {"allow_http": True, "timeout": "300s"}
    if work.ca_file:
        options["root_certificate"] = Path(work.ca_file).read_bytes()
    return GCSStore(
        work.bucket,
        config={"base_url": work.url, "bearer_token": "none", "skip_signature": True},
        client_options=options,
    )


async def get_many(work: Work) -> int:
    store = open_store(work)

    async def one(key: str) -> int:
        response = await store.get_async(key)
        return len(await response.bytes_async())

    return await bounded(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, each into memory of its own, and return the bytes received.

    One stream for the whole object was faster over loopback than concurrent ranges.
    """
    store = open_store(work)

    async def read(work: Work) -> int:
        total = 0
        for key, view in zip(work.each_key(), memory_of(work, again=False), strict=False):
            response, at = await store.get_async(key), 0
            async for piece in response.stream(min_chunk_size=_PIECE_BYTES):
                # Raises an error if the object is larger than the memory.
                at += put_into(view[at : at + len(piece)], piece)
            total += at
        return total

    return await steady(read, work)


async def get_into(work: Work) -> int:
    return await read_ranges(work, again=True)


async def read_ranges(work: Work, *, again: bool, is_state: bool = False) -> int:
    """Read each object, or a state, in ranges into memory; see `fill`."""
    store = open_store(work)

    async def read(key: str, start: int, end: int, view: memoryview) -> int:
        key = state_key(work.dtype, work.size_bytes) if is_state else key
        return put_into(view, await store.get_range_async(key, start=start, end=end))

    return await fill(read, work, again=again)


async def get_range(work: Work) -> int:
    store = open_store(work)

    async def read(key: str, start: int, end: int) -> int:
        return len(await store.get_range_async(key, start=start, end=end))

    return await each_range(read, work)


async def put_many(work: Work) -> int:
    store = open_store(work)
    body = work.body()

    async def one(key: str) -> int:
        await store.put_async(f"put/{key}", body, use_multipart=False)
        return len(body)

    return await bounded(one, work)


async def put(store: GCSStore, key: str, work: Work) -> int:
    """Write one object in parallel parts and return the bytes sent."""
    body = work.body()
    await store.put_async(
        f"put/{key}",
        body,
        use_multipart=True,
        chunk_size=part_size_bytes(work),
        max_concurrency=work.in_flight,
    )
    return len(body)


async def put_one(work: Work) -> int:
    store = open_store(work)

    return await one_by_one(lambda key, work: put(store, key, work), work)


async def first_get(work: Work) -> int:
    return first_gets(_FIRST_GET, work)
