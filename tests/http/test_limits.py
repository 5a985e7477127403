"""Places of a pool are never lost, whatever happens to those who wait for one."""

from __future__ import annotations

import asyncio

import pytest

from aioflux._http import ConnectionLostError, ProtocolError
from aioflux._http.connection_slots import Lane
from tests.http.pools import PATIENT, opening, until
from tests.http.scripted import Peer, answering, echoing, serving

pytestmark = pytest.mark.asyncio


async def test_a_pool_needs_a_place(make_pool) -> None:
    with pytest.raises(ValueError, match="max_connections must be above 0, not 0"):
        async with make_pool(max_connections=0):
            pass


async def test_a_waiter_that_is_cancelled_as_it_is_served_passes_its_place_on() -> None:
    lane = Lane(1)
    assert await lane.take() is None
    second, third = (asyncio.create_task(lane.take()) for _ in range(2))
    await asyncio.sleep(0)
    lane.give_back(None)
    second.cancel()
    assert await third is None
    assert second.cancelled()
    lane.give_back(None)
    assert lane.num_taken == 0


async def test_a_waiter_that_is_cancelled_leaves_the_line() -> None:
    lane = Lane(1)
    await lane.take()
    waiter = asyncio.create_task(lane.take())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    lane.give_back(None)
    assert lane.num_taken == 0


async def test_those_who_wait_all_fail_but_the_cancelled() -> None:
    lane = Lane(1)
    await lane.take()
    cancelled, waiting = (asyncio.create_task(lane.take()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    lane.fail_waiters(ConnectionLostError("closed"))
    with pytest.raises(ConnectionLostError):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_those_who_wait_fail_with_the_pool() -> None:
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


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n"])
async def test_both_clients_refuse_what_is_not_http(make_pool, answer: bytes) -> None:
    async with serving(answering(answer)) as (_, origin), make_pool(timeouts=PATIENT) as pool:
        with pytest.raises(ProtocolError):
            await pool.request(origin, b"GET", b"/")
