"""Kept-alive connections that the server has closed are replaced, and no write is sent twice."""

from __future__ import annotations

import asyncio

import pytest

from aioflux._http.errors import ConnectionLostError
from tests.http.pools import MIB, opening
from tests.http.scripted import Peer, answering, echoing, ok, serving

pytestmark = pytest.mark.asyncio

WRITES = pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE"])


async def responds_once_and_resets(peer: Peer) -> None:
    await peer.read_request()
    await peer.send(ok())
    await peer.read_head()
    peer.reset()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_it_is_replaced_under_a_read(method: bytes) -> None:
    async with (
        serving(responds_once_and_resets, answering(ok())) as (server, origin),
        opening() as pool,
    ):
        for _ in range(2):
            assert (await pool.request(origin, method, b"/")).status == 200
        assert (pool.num_stale, pool.num_opened, server.num_accepted) == (1, 2, 2)


async def test_many_at_once_are_replaced_under_reads() -> None:
    async def once(peer: Peer) -> None:
        await peer.read_request()
        if server.num_accepted == 50:
            all_open.set()
        await all_open.wait()
        await peer.send(ok(b"first"))
        await peer.read_head()
        peer.reset()

    all_open = asyncio.Event()
    scripts = [once] * 50 + [answering(ok(b"second"))]
    async with serving(*scripts) as (server, origin), opening(max_idle=50) as pool:
        for body in (b"first", b"second"):
            responses = await asyncio.gather(
                *(pool.request(origin, b"GET", b"/") for _ in range(50))
            )
            assert {bytes(response.body) for response in responses} == {body}
        assert (pool.num_stale, pool.num_opened) == (50, 100)


@WRITES
async def test_a_connection_already_closed_is_replaced_before_a_write_is_sent(
    method: bytes,
) -> None:
    async def once(peer: Peer) -> None:
        peers.append(peer)
        server.requests.append(await peer.read_request())
        await peer.send(ok())
        server.requests.append(await peer.read_request())

    async def second(peer: Peer) -> None:
        server.requests.append(await peer.read_request())
        await peer.send(ok())
        await peer.wait_closed_by_client()

    peers: list[Peer] = []
    async with serving(once, second) as (server, origin), opening() as pool:
        await pool.request(origin, method, b"/", body=b"1")
        peers[0].shut_now()
        # Without an iteration of the loop between: only the kernel knows.
        assert (await pool.request(origin, method, b"/", body=b"2")).status == 200
        assert [body for _, body in server.requests] == [b"1", b"2"]
        assert (pool.num_stale, pool.num_opened) == (1, 2)


@WRITES
async def test_a_write_that_was_sent_completely_is_not_sent_twice(method: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(ok())
        server.requests.append(await peer.read_request())

    async with serving(script) as (server, origin), opening() as pool:
        await pool.request(origin, method, b"/", body=b"1")
        with pytest.raises(ConnectionLostError) as caught:
            await pool.request(origin, method, b"/", body=b"2")
        assert caught.value.request_sent
        assert len(server.requests) == 1


async def test_a_write_that_was_not_sent_completely_is_sent_again() -> None:
    async with (
        serving(responds_once_and_resets, echoing) as (server, origin),
        opening() as pool,
    ):
        await pool.request(origin, b"PUT", b"/", body=b"1")
        data = bytes(range(256)) * (16 * MIB // 256)
        response = await pool.request(origin, b"PUT", b"/", body=data)
        assert response.body == data
        assert (pool.num_stale, server.num_accepted) == (1, 2)


async def test_a_write_that_broke_off_on_a_new_connection_is_not_sent_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_head()
        peer.reset()

    async with serving(script) as (server, origin), opening() as pool:
        with pytest.raises(ConnectionLostError):
            await pool.request(origin, b"PUT", b"/", body=bytes(16 * MIB))
        assert server.num_accepted == 1
