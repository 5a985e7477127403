"""gcloud-aio-storage, over aiohttp."""

from __future__ import annotations

import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
from gcloud.aio.storage import Storage

from perf.peers._parts import fill, one_by_one, put_into, ssl_context
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.work import Work

_TIMEOUT = 300


@asynccontextmanager
async def _open(work: Work) -> AsyncIterator[Storage]:
    connector = aiohttp.TCPConnector(limit=work.in_flight, ssl=ssl_context(work) or True)
    async with aiohttp.ClientSession(connector=connector) as session:
        # `api_is_dev` sends requests without credentials.
        yield Storage(session=session, api_root=work.url, api_is_dev=True)  # type: ignore[arg-type]


async def get_many(work: Work) -> int:
    async with _open(work) as storage:

        async def one(key: str) -> int:
            return len(await storage.download(work.bucket, key, timeout=_TIMEOUT))

        return await bounded(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, in ranges, each into memory of its own."""
    return await _read(work, again=False)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory, in ranges."""
    return await _read(work, again=True)


async def _read(work: Work, *, again: bool) -> int:
    async with _open(work) as storage:

        async def read(key: str, start: int, end: int, view: memoryview) -> int:
            headers = {"Range": f"bytes={start}-{end - 1}"}
            data = await storage.download(work.bucket, key, headers=headers, timeout=_TIMEOUT)
            return put_into(view, data)

        return await fill(read, work, again=again)


async def put_many(work: Work) -> int:
    body = work.body()
    async with _open(work) as storage:

        async def one(key: str) -> int:
            answer = await storage.upload(work.bucket, f"put/{key}", body, timeout=_TIMEOUT)
            return int(answer["size"])

        return await bounded(one, work)


async def put_one(work: Work) -> int:
    async with _open(work) as storage:

        async def write(key: str, work: Work) -> int:
            answer = await storage.upload(
                work.bucket,
                f"put/{key}",
                io.BytesIO(work.body()),
                force_resumable_upload=True,
                timeout=_TIMEOUT,
            )
            return int(answer["size"])

        return await one_by_one(write, work)
