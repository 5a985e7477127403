"""Pools with short timeouts, and a way to wait for what other tasks bring about."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from aioflux._policy import Timeouts
from aioflux.http import Pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

FAST = Timeouts(connect_seconds=5, progress_seconds=0.5, idle_seconds=2)
MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def opening(**options: Any) -> AsyncIterator[Pool]:
    """The data plane alone, for what only it promises."""
    pool = Pool(**({"max_connections": 4, "timeouts": FAST} | options))
    try:
        yield pool
    finally:
        async with asyncio.timeout(5):
            await pool.aclose()
        assert pool.num_open == 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition that other tasks bring about."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  any task may bring it about, in any turn of the loop
            await asyncio.sleep(0)
