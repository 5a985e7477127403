"""obstore, with google-crc32c over the bytes that it returned or sends.

obstore compares no checksums. google-crc32c accepts only `bytes`, so that each body that was read
is copied once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import google_crc32c

from perf.peers._parts import one_by_one
from perf.peers.obstore import open_store, put
from perf.servers import contents
from perf.work import bounded

if TYPE_CHECKING:
    from perf.work import Work


async def get_many(work: Work) -> int:
    """Read every key, compare the crc32c of its bytes, and return the bytes received.

    Raises:
        ValueError: The bytes of an object are wrong.
    """
    store, expected = open_store(work), google_crc32c.value(contents(work.size_bytes))

    async def one(key: str) -> int:
        response = await store.get_async(key)
        data = (await response.bytes_async()).to_bytes()
        if google_crc32c.value(data) != expected:
            raise ValueError(f"the crc32c of {key} is wrong")
        return len(data)

    return await bounded(one, work)


async def put_one(work: Work) -> int:
    """Compute the crc32c of each object, write it in parallel parts, and return the bytes sent."""
    store = open_store(work)

    async def write(key: str, work: Work) -> int:
        google_crc32c.value(work.body())
        return await put(store, key, work)

    return await one_by_one(write, work)
