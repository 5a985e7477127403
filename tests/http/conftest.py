"""Fixtures that run tests on both transports and on both event loops.

The event loops differ in when they copy data, pause reading and report a closed connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from aioflux._http import Pool
from tests.http.authority import Authority
from tests.http.pools import PATIENT, AiohttpPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=[Pool, AiohttpPool], ids=["pool", "aiohttp"])
def make_pool(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A context manager over a pool of either transport."""

    @contextlib.asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[Any]:
        pool = request.param(**({"max_connections": 4, "timeouts": PATIENT} | options))
        try:
            yield pool
        finally:
            await pool.aclose()

    return make


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))
