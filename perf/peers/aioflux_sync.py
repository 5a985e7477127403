"""aioflux: the blocking store of `aioflux.sync`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.auth.credentials import AnonymousCredentials

import aioflux
from aioflux import sync
from perf._meter import steady
from perf.peers._fresh import first_gets
from perf.peers._parts import ssl_context

if TYPE_CHECKING:
    from perf.work import Work


_FIRST_GET = """
import sys
import aioflux

url, uri, bucket, key = sys.argv[1:]
with aioflux.sync.open_store(uri, endpoint_url=url) as store:
    print(len(store.get(key)))
"""


def _open(work: Work) -> sync.Store:
    return sync.open_store(
        work.uri(),
        endpoint_url=work.url,
        ssl_context=ssl_context(work),
        credentials=AnonymousCredentials() if work.ca_file else None,  # type: ignore[no-untyped-call]
        transfer=aioflux.TransferOptions(
            max_in_flight=work.in_flight, range_size_bytes=work.range_size_bytes
        ),
    )


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    with _open(work) as store:

        async def read(work: Work) -> int:
            return sum(len(data) for _, data in store.get_many(work.each_key(), ordered=False))

        return await steady(read, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, each in ranges, and return the bytes received."""
    with _open(work) as store:

        async def read(work: Work) -> int:
            return sum(len(store.get(key)) for key in work.each_key())

        return await steady(read, work)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory and return the bytes received."""
    with _open(work) as store:

        async def read(work: Work) -> int:
            buffer = bytearray(work.size_bytes)
            return sum(store.get_into(key, buffer) for key in work.each_key())

        return await steady(read, work)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    body = work.body()
    with _open(work) as store:

        async def write(work: Work) -> int:
            pairs = ((f"put/{key}", body) for key in work.each_key())
            return sum(store.put_many(pairs).sizes)

        return await steady(write, work)


async def first_get(work: Work) -> int:
    """Read every key in a fresh process and return the bytes received."""
    return first_gets(_FIRST_GET, work)
