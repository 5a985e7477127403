"""aioflux: the blocking store of `aioflux.sync`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.auth.credentials import AnonymousCredentials

import aioflux
from aioflux import sync
from perf._meter import steady
from perf.peers._parts import ssl_context

if TYPE_CHECKING:
    from perf.work import Work


def _open(work: Work) -> sync.Store:
    return sync.open_store(
        work.uri(),
        endpoint_url=work.url,
        ssl_context=ssl_context(work),
        credentials=AnonymousCredentials() if work.ca_file else None,  # type: ignore[no-untyped-call]
        transfer=aioflux.TransferOptions(
            max_in_flight=work.in_flight, range_size_bytes=work.range_size_bytes
        ),
    )


async def get_one(work: Work) -> int:
    """Read one object after the other, each in ranges, and return the bytes received."""
    with _open(work) as store:

        async def read(work: Work) -> int:
            return sum(len(store.get(key)) for key in work.each_key())

        return await steady(read, work)
