"""Every socket of an aiohttp session is closed with it, also those of cancelled requests."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import aiohttp
import pytest

from aioflux._http import SocketTracker

if TYPE_CHECKING:
    from tests.http.authority import Authority

pytestmark = pytest.mark.asyncio


def opened(sockets: SocketTracker, ssl: object = True) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(socket_factory=sockets.create, ssl=ssl)  # type: ignore[arg-type]
    return aiohttp.ClientSession(connector=connector)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_request_without_a_response(scheme: str) -> None:
    """Over TLS the handshake waits, since the peer sends nothing."""
    sockets = SocketTracker()
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        session = opened(sockets)
        requested = asyncio.create_task(
            session.get(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
        )
        with closing(await asyncio.to_thread(accept_request, silent)):
            assert sockets.num_open == 1
            requested.cancel()
            with suppress(asyncio.CancelledError):
                await requested
            await sockets.aclose(session)
    assert session.closed
    assert sockets.num_open == 0


async def test_requests_cancelled_before_their_response(authority: Authority) -> None:
    """aiohttp forgets their connections while these still wait for the peer to close, too."""
    sockets = SocketTracker()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        shaken = asyncio.create_task(asyncio.to_thread(shake_hands, server, authority))
        session = opened(sockets, authority.client_context())
        url = f"https://localhost:{server.getsockname()[1]}/"
        requested = asyncio.create_task(session.get(url))
        with closing(await shaken):
            requested.cancel()
            with suppress(asyncio.CancelledError):
                await requested
            assert sockets.num_open == 1
            await sockets.aclose(session)
            assert sockets.num_open == 0


def accept_request(server: socket.socket) -> socket.socket:
    """Accept one connection, read the start of its request, and do not respond."""
    accepted = server.accept()[0]
    assert accepted.recv(1)
    return accepted


def shake_hands(server: socket.socket, authority: Authority) -> socket.socket:
    """Accept one connection and its handshake, read from its request, and do not respond."""
    accepted = authority.server_context().wrap_socket(server.accept()[0], server_side=True)
    assert accepted.recv(1)
    return accepted
