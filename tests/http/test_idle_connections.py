"""Idle connections of a pool, and requests that are pending when it is closed."""

from __future__ import annotations

import asyncio

import pytest

from aioflux._http.errors import ConnectionLostError, ProtocolError
from tests.http.pools import PATIENT, opening, until
from tests.http.scripted import Peer, answering, echoing, ok, serving

pytestmark = pytest.mark.asyncio


async def test_pending_requests_fail_when_the_pool_is_closed() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_request()
        begun.set()
        await peer.wait_closed_by_client()

    begun = asyncio.Event()
    async with serving(script) as (_, origin), opening() as pool:
        tasks = [asyncio.create_task(pool.request(origin, b"GET", b"/")) for _ in range(3)]
        await begun.wait()
        await pool.aclose()
        for task in tasks:
            with pytest.raises(ConnectionLostError, match="closed"):
                await task


async def test_no_more_than_max_idle_connections_are_kept() -> None:
    async with serving(answering(ok(b"a"))) as (server, origin), opening(max_idle=3) as pool:
        await asyncio.gather(*(pool.request(origin, b"GET", b"/") for _ in range(20)))
        await until(lambda: pool.num_open == 3)
        assert pool.num_idle == 3
        await asyncio.gather(*(pool.request(origin, b"GET", b"/") for _ in range(3)))
        assert server.num_accepted == 20


async def test_a_connection_that_opens_as_the_pool_closes_is_closed() -> None:
    async with serving(echoing) as (server, origin), opening() as pool:
        task = asyncio.create_task(pool.request(origin, b"GET", b"/"))
        await asyncio.sleep(0)
        await pool.aclose()
        with pytest.raises(ConnectionLostError, match="pool was closed"):
            await task
        await until(lambda: pool.num_open == 0)
        assert not server.requests


@pytest.mark.parametrize("response", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n"])
async def test_what_is_not_http_is_rejected(response: bytes) -> None:
    async with serving(answering(response)) as (_, origin), opening(timeouts=PATIENT) as pool:
        with pytest.raises(ProtocolError):
            await pool.request(origin, b"GET", b"/")
