"""azure-storage-blob: the asynchronous client, with the same block size as the other peers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from azure.storage.blob.aio import BlobServiceClient

from perf._meter import steady
from perf.access import connection_string
from perf.peers._parts import part_size_bytes
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from azure.storage.blob.aio import ContainerClient

    from perf.work import Work


@asynccontextmanager
async def _open(work: Work) -> AsyncIterator[ContainerClient]:
    async with BlobServiceClient.from_connection_string(
        connection_string(work.url),
        max_block_size=part_size_bytes(work),
        max_single_put_size=part_size_bytes(work),
        max_single_get_size=work.range_size_bytes,
        max_chunk_get_size=work.range_size_bytes,
    ) as service:
        yield service.get_container_client(work.bucket)


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    async with _open(work) as container:

        async def one(key: str) -> int:
            stream = await container.download_blob(key)
            return len(await stream.readall())

        return await bounded(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, each in ranges, and return the bytes received."""
    async with _open(work) as container:

        async def read(work: Work) -> int:
            total = 0
            for key in work.each_key():
                stream = await container.download_blob(key, max_concurrency=work.in_flight)
                total += len(await stream.readall())
            return total

        return await steady(read, work)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    data = work.body()
    async with _open(work) as container:

        async def one(key: str) -> int:
            await container.upload_blob(f"put/{key}", data, overwrite=True)
            return len(data)

        return await bounded(one, work)


async def put_one(work: Work) -> int:
    """Write one object after the other in parallel blocks and return the bytes sent."""
    async with _open(work) as container:

        async def write(work: Work) -> int:
            data, total = work.body(), 0
            for key in work.each_key():
                await container.upload_blob(
                    f"put/{key}", data, overwrite=True, max_concurrency=work.in_flight
                )
                total += len(data)
            return total

        return await steady(write, work)
