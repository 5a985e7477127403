"""Pools, and a way to wait for what other tasks bring about."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from aioflux._http import Pool
from aioflux.options import Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

# A machine that stands still for some seconds must not be taken for a server that does.
PATIENT = Timeouts(connect_seconds=60, progress_seconds=60, idle_seconds=60)
STALL_SECONDS = 0.3
SHORT = Timeouts(connect_seconds=60, progress_seconds=STALL_SECONDS, idle_seconds=60)
"""For what waits for the end of a stall."""
FAR_SECONDS = 60
"""By when everything that is waited for has long happened."""
MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def opening(**options: Any) -> AsyncIterator[Pool]:
    """The data plane alone, for what only it promises."""
    pool = Pool(**({"max_connections": 4, "timeouts": PATIENT} | options))
    try:
        yield pool
    finally:
        async with asyncio.timeout(FAR_SECONDS):
            await pool.aclose()
        assert pool.num_open == 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition that other tasks bring about."""
    async with asyncio.timeout(FAR_SECONDS):
        while not condition():  # noqa: ASYNC110  any task may bring it about, in any turn of the loop
            await asyncio.sleep(0)
