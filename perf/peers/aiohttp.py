"""aiohttp with the XML API, without a storage library."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from perf.peers._parts import fill, put_into, ssl_context
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.work import Work


@asynccontextmanager
async def _open(work: Work) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=work.in_flight, ssl=ssl_context(work) or True)
    async with aiohttp.ClientSession(
        f"{work.url}/{work.bucket}/",
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        raise_for_status=True,
    ) as session:
        yield session


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    async with _open(work) as session:

        async def one(key: str) -> int:
            async with session.get(key) as response:
                return len(await response.read())

        return await bounded(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, in ranges, each into memory of its own."""
    return await _read(work, again=False)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory, in ranges."""
    return await _read(work, again=True)


async def _read(work: Work, *, again: bool) -> int:
    async with _open(work) as session:

        async def read(key: str, start: int, end: int, view: memoryview) -> int:
            at, headers = 0, {"Range": f"bytes={start}-{end - 1}"}
            async with session.get(key, headers=headers) as response:
                # Piece by piece: its `read` would join them first. What does not fit raises.
                async for piece in response.content.iter_any():
                    at += put_into(view[at : at + len(piece)], piece)
            return at

        return await fill(read, work, again=again)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    body = work.body()
    async with _open(work) as session:

        async def one(key: str) -> int:
            async with session.put(f"put/{key}", data=body) as response:
                await response.read()
            return len(body)

        return await bounded(one, work)
