"""Connection slots are never lost, whatever happens to the requests that wait for one."""

from __future__ import annotations

import asyncio

import pytest

from aioflux._http import ConnectionLostError, ProtocolError
from aioflux._http.connection_slots import ConnectionSlots
from tests.http.pools import PATIENT, opening, until
from tests.http.scripted import Peer, answering, echoing, serving

pytestmark = pytest.mark.asyncio


async def test_a_pool_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="max_connections must be above 0, not 0"):
        async with opening(max_connections=0):
            pass


async def test_a_waiter_that_is_cancelled_as_it_acquires_releases_its_slot() -> None:
    slots = ConnectionSlots(1)
    assert await slots.acquire() is None
    second, third = (asyncio.create_task(slots.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    slots.release(None)
    second.cancel()
    assert await third is None
    assert second.cancelled()
    slots.release(None)
    assert slots.num_held == 0


async def test_a_waiter_that_is_cancelled_no_longer_waits() -> None:
    slots = ConnectionSlots(1)
    await slots.acquire()
    waiter = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    slots.release(None)
    assert slots.num_held == 0


async def test_all_waiters_fail_but_the_cancelled() -> None:
    slots = ConnectionSlots(1)
    await slots.acquire()
    cancelled, waiting = (asyncio.create_task(slots.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    slots.fail_waiters(ConnectionLostError("closed"))
    with pytest.raises(ConnectionLostError):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_waiters_fail_when_the_pool_is_closed() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_request()
        begun.set()
        await peer.wait_closed_by_client()

    begun = asyncio.Event()
    async with serving(script) as (_, origin), opening(max_connections=1) as pool:
        tasks = [asyncio.create_task(pool.request(origin, b"GET", b"/")) for _ in range(3)]
        await begun.wait()
        await pool.aclose()
        for task in tasks:
            with pytest.raises(ConnectionLostError, match="pool was closed"):
                await task


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
