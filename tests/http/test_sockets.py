"""Every socket of an aiohttp session ends with it, also those of requests that were cancelled."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import aiohttp
import pytest

from aioflux._http import Sockets

if TYPE_CHECKING:
    from tests.http.authority import Authority

pytestmark = pytest.mark.asyncio


def opened(sockets: Sockets, ssl: object = True) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(socket_factory=sockets.make, ssl=ssl)  # type: ignore[arg-type]
    return aiohttp.ClientSession(connector=connector)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_request_that_was_never_answered(scheme: str) -> None:
    """Over TLS it is the handshake that waits: the peer says nothing at all."""
    sockets = Sockets()
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        session = opened(sockets)
        asked = asyncio.create_task(session.get(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"))
        with closing(await asyncio.to_thread(accept_asked, silent)):
            assert sockets.num_open == 1
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            await sockets.aclose(session)
    assert session.closed
    assert sockets.num_open == 0


async def test_requests_cancelled_before_their_answer(authority: Authority) -> None:
    """aiohttp forgets their connections while these still wait for the peer to close, too."""
    sockets = Sockets()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        shaken = asyncio.create_task(asyncio.to_thread(shake_hands, server, authority))
        session = opened(sockets, authority.client_context())
        url = f"https://localhost:{server.getsockname()[1]}/"
        asked = asyncio.create_task(session.get(url))
        with closing(await shaken):
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            assert sockets.num_open == 1
            await sockets.aclose(session)
            assert sockets.num_open == 0


def accept_asked(server: socket.socket) -> socket.socket:
    """Accept one connection that has begun to ask, and do nothing for it."""
    accepted = server.accept()[0]
    assert accepted.recv(1)
    return accepted


def shake_hands(server: socket.socket, authority: Authority) -> socket.socket:
    """Accept one connection, and do nothing for it after the handshake but hear its request."""
    accepted = authority.server_context().wrap_socket(server.accept()[0], server_side=True)
    assert accepted.recv(1)
    return accepted
