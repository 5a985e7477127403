"""gcloud-aio-storage, over aiohttp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from gcloud.aio.storage import Storage

from perf.work import bounded

if TYPE_CHECKING:
    from perf.work import Work


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    connector = aiohttp.TCPConnector(limit=work.in_flight)
    async with aiohttp.ClientSession(connector=connector) as session:
        storage = Storage(session=session, api_root=work.url)

        async def one(key: str) -> int:
            return len(await storage.download(work.bucket, key, timeout=300))

        return await bounded(one, work)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    connector = aiohttp.TCPConnector(limit=work.in_flight)
    body = work.body()
    async with aiohttp.ClientSession(connector=connector) as session:
        storage = Storage(session=session, api_root=work.url)

        async def one(key: str) -> int:
            await storage.upload(work.bucket, f"put/{key}", body, timeout=300)
            return len(body)

        return await bounded(one, work)
