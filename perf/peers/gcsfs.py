"""gcsfs, asynchronous, over aiohttp.

The names of its asynchronous methods begin with `_`, as in fsspec's AsyncFileSystem.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from perf._meter import steady
from perf.peers._fresh import first_gets
from perf.peers._parts import fill, put_into, ssl_context
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.work import Work

# Read when gcsfs is imported. Without it, gcsfs requests the bucket type over gRPC, for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcsfs  # type: ignore[import-untyped]

_FIRST_GET = """
import os, sys
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
import gcsfs

url, uri, bucket, key = sys.argv[1:]
filesystem = gcsfs.GCSFileSystem(token="anon", endpoint_url=url)
print(len(filesystem.cat_file(f"{bucket}/{key}")))
"""


@asynccontextmanager
async def _open(work: Work) -> AsyncIterator[Any]:
    connector = aiohttp.TCPConnector(limit=work.in_flight, ssl=ssl_context(work) or True)
    filesystem = gcsfs.GCSFileSystem(
        token="anon",  # noqa: S106  no secret
        endpoint_url=work.url,
        asynchronous=True,
        loop=asyncio.get_running_loop(),
        cache_timeout=0,
        session_kwargs={"connector": connector},
        skip_instance_cache=True,
    )
    session = await filesystem._set_session()  # noqa: SLF001
    try:
        yield filesystem
    finally:
        await session.close()


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    async with _open(work) as filesystem:

        async def one(key: str) -> int:
            return len(await filesystem._cat_file(f"{work.bucket}/{key}"))  # noqa: SLF001

        return await bounded(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, in ranges, each into memory of its own.

    gcsfs's own `concurrency=` copies the pieces once more, which takes 1.5 times as long.
    """
    return await _read(work, again=False)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory, in ranges."""
    return await _read(work, again=True)


async def _read(work: Work, *, again: bool) -> int:
    async with _open(work) as filesystem:

        async def read(key: str, start: int, end: int, view: memoryview) -> int:
            path = f"{work.bucket}/{key}"
            return put_into(view, await filesystem._cat_file(path, start=start, end=end))  # noqa: SLF001

        return await fill(read, work, again=again)


async def list_all(work: Work) -> int:
    """List a set, and return the bytes of its objects."""
    async with _open(work) as filesystem:
        found = await filesystem._find(f"{work.bucket}/{work.prefix}", detail=True)  # noqa: SLF001
        return sum(about["size"] for about in found.values())


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    body = work.body()
    async with _open(work) as filesystem:

        async def one(key: str) -> int:
            await filesystem._pipe_file(f"{work.bucket}/put/{key}", body)  # noqa: SLF001
            return len(body)

        return await bounded(one, work)


async def put_one(work: Work) -> int:
    """Write one object after the other by a resumable upload and return the bytes sent."""
    async with _open(work) as filesystem:

        async def write(work: Work) -> int:
            body, total = work.body(), 0
            for key in work.each_key():
                await filesystem._pipe_file(  # noqa: SLF001
                    f"{work.bucket}/put/{key}", body, chunksize=work.range_size_bytes
                )
                total += len(body)
            return total

        return await steady(write, work)


async def first_get(work: Work) -> int:
    """Read every key in a fresh process and return the bytes received."""
    return first_gets(_FIRST_GET, work)
