"""Bare aiohttp on the XML API: what one has without a library for storage."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from perf.peers._parts import ranges, ssl_context
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

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
    """Read one object after the other, each in ranges, and return the bytes received."""
    return await get_into(work)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory and return the bytes received."""
    async with _open(work) as session:
        with memoryview(bytearray(work.size_bytes)) as view:

            async def worker(key: str, todo: Iterator[tuple[int, int]]) -> int:
                done = 0
                for start, end in todo:
                    at, headers = start, {"Range": f"bytes={start}-{end - 1}"}
                    async with session.get(key, headers=headers) as response:
                        # Piece by piece: `read` would join them first.
                        async for piece in response.content.iter_any():
                            view[at : at + len(piece)] = piece
                            at += len(piece)
                    done += at - start
                return done

            total = 0
            for key in work.each_key():
                todo = iter(ranges(work))
                workers = (worker(key, todo) for _ in range(work.in_flight))
                total += sum(await asyncio.gather(*workers))
            return total


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    body = work.body()
    async with _open(work) as session:

        async def one(key: str) -> int:
            async with session.put(f"put/{key}", data=body) as response:
                await response.read()
            return len(body)

        return await bounded(one, work)
