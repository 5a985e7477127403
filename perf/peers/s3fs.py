"""s3fs, asynchronous, over aiobotocore.

The names of its asynchronous methods begin with `_`, as in fsspec's AsyncFileSystem.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import s3fs  # type: ignore[import-not-found, import-untyped]

from perf._meter import steady
from perf.peers._parts import fill, put_into
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.work import Work


@asynccontextmanager
async def _open(work: Work) -> AsyncIterator[Any]:
    filesystem = s3fs.S3FileSystem(
        endpoint_url=work.url,
        asynchronous=True,
        loop=asyncio.get_running_loop(),
        config_kwargs={"max_pool_connections": work.in_flight},
        skip_instance_cache=True,
    )
    session = await filesystem.set_session()
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
    """Read one object after the other, in ranges, each into memory of its own."""
    async with _open(work) as filesystem:

        async def read(key: str, start: int, end: int, view: memoryview) -> int:
            path = f"{work.bucket}/{key}"
            return put_into(view, await filesystem._cat_file(path, start=start, end=end))  # noqa: SLF001

        return await fill(read, work, again=False)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    data = work.body()
    async with _open(work) as filesystem:

        async def one(key: str) -> int:
            await filesystem._pipe_file(f"{work.bucket}/put/{key}", data)  # noqa: SLF001
            return len(data)

        return await bounded(one, work)


async def put_one(work: Work) -> int:
    """Write one object after the other in parallel parts and return the bytes sent."""
    async with _open(work) as filesystem:

        async def write(work: Work) -> int:
            data, size, total = work.body(), work.range_size_bytes, 0
            for key in work.each_key():
                path = f"{work.bucket}/put/{key}"
                await filesystem._pipe_file(path, data, chunksize=size)  # noqa: SLF001
                total += len(data)
            return total

        return await steady(write, work)
