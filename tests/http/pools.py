"""Pools for tests, and a wait for a condition."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from aioflux._http.pool import Pool
from aioflux.options import Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = [
    "FAR_SECONDS",
    "MIB",
    "PATIENT",
    "SHORT",
    "STALL_SECONDS",
    "opening",
    "until",
]

# A machine that stalls for some seconds must not look like a stalled server.
PATIENT = Timeouts(connect_seconds=60, progress_seconds=60, idle_seconds=60)
STALL_SECONDS = 0.15
SHORT = Timeouts(connect_seconds=60, progress_seconds=STALL_SECONDS, idle_seconds=60)
"""For tests that wait for the timeout of a stall."""
FAR_SECONDS = 60
"""Longer than any wait of a test that passes."""
MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def opening(**options: Any) -> AsyncIterator[Pool]:
    """Open a `Pool`, and see that closing it closes every connection."""
    pool = Pool(**({"max_idle": 4, "timeouts": PATIENT} | options))
    try:
        yield pool
    finally:
        async with asyncio.timeout(FAR_SECONDS):
            await pool.aclose()
        assert pool.num_open == 0


async def until(condition: Callable[[], bool]) -> None:
    """Iterate the loop until other tasks make a condition true."""
    async with asyncio.timeout(FAR_SECONDS):
        while not condition():  # noqa: ASYNC110  any task may make it true, in any iteration of the loop
            await asyncio.sleep(0)
