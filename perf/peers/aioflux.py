"""aioflux: Store, with checksums, retry and limits on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aioflux

if TYPE_CHECKING:
    from perf.work import Work


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    transfer = aioflux.TransferOptions(max_in_flight=work.in_flight)
    uri = f"gs://{work.bucket}"
    async with aioflux.open_store(uri, endpoint_url=work.url, transfer=transfer) as store:
        total = 0
        async for _, data in store.get_many(work.each_key(), ordered=False):
            total += len(data)
        return total


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    transfer = aioflux.TransferOptions(max_in_flight=work.in_flight)
    uri = f"gs://{work.bucket}"
    body = work.body()
    async with aioflux.open_store(uri, endpoint_url=work.url, transfer=transfer) as store:
        pairs = ((f"put/{key}", body) for key in work.each_key())
        return sum([meta.size async for meta in store.put_many(pairs)])
