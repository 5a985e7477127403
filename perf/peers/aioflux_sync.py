"""aioflux: `get` of the blocking store of `aioflux.sync`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux import sync
from perf._meter import steady
from perf.peers._aioflux import store_options

if TYPE_CHECKING:
    from perf.work import Work


async def get_one(work: Work) -> int:
    with sync.open_store(work.uri(), **store_options(work)) as store:

        async def read(work: Work) -> int:
            return sum(len(store.get(key)) for key in work.each_key())

        return await steady(read, work)
