"""gcsfs, asynchronous, over aiohttp.

The names of its asynchronous methods begin with `_`, as in fsspec's AsyncFileSystem.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from perf.peers._fresh import first_gets
from perf.peers._gcsfs import open_filesystem
from perf.peers._parts import ssl_context
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.work import Work

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
    filesystem = open_filesystem(
        work,
        asynchronous=True,
        loop=asyncio.get_running_loop(),
        session_kwargs={"connector": connector},
        skip_instance_cache=True,
    )
    session = await filesystem._set_session()  # noqa: SLF001
    try:
        yield filesystem
    finally:
        await session.close()


async def get_many(work: Work) -> int:
    async with _open(work) as filesystem:

        async def one(key: str) -> int:
            return len(await filesystem._cat_file(f"{work.bucket}/{key}"))  # noqa: SLF001

        return await bounded(one, work)


async def first_get(work: Work) -> int:
    return first_gets(_FIRST_GET, work)
