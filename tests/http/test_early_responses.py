"""A response before the end of the upload is read and returned, and ends the connection."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from aioflux._http.errors import ConnectionLostError
from tests.http.oracle import FedConnection, Transport
from tests.http.pools import MIB, opening
from tests.http.scripted import Peer, echoing, ok, serving

if TYPE_CHECKING:
    from tests.http.authority import Authority

pytestmark = pytest.mark.asyncio

BUSY = ok(b"later", b"Retry-After: 7", status=b"503 Busy")


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_it_is_returned_and_the_connection_is_not_used_again(
    authority: Authority, tls: bool
) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_head()
        await peer.reader.readexactly(100_000)
        await peer.send(BUSY)
        await stop_reading.wait()

    stop_reading = asyncio.Event()
    context = authority.server_context() if tls else None
    async with (
        serving(script, echoing, tls=context) as (server, origin),
        opening(ssl_context=authority.client_context()) as pool,
    ):
        response = await pool.request(origin, b"PUT", b"/", body=bytes(64 * MIB))
        stop_reading.set()
        assert (response.status, bytes(response.body)) == (503, b"later")
        assert response.headers[b"retry-after"] == b"7"
        assert bytes((await pool.request(origin, b"PUT", b"/", body=b"b")).body) == b"b"
        assert server.num_accepted == 2


class SocketTransport(Transport):
    """A transport over a socket, whose write has failed: the response is unread in the kernel."""

    def __init__(self, ours: socket.socket) -> None:
        super().__init__()
        self._ours = ours

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._ours if name == "socket" else default


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def upload(ours: socket.socket, *, is_tls: bool = False) -> tuple[Any, asyncio.Future]:
    fed = FedConnection(SocketTransport(ours), is_tls=is_tls)
    return fed.connection, fed.send(b"PUT / HTTP/1.1\r\n\r\n", [bytes(10)])


@pytest.mark.parametrize(
    "response", [BUSY, b"HTTP/1.1 503 Busy\r\n\r\nlater"], ids=["length", "until-close"]
)
async def test_it_is_read_from_a_connection_whose_write_has_failed(ends, response: bytes) -> None:
    ours, theirs = ends
    connection, future = upload(ours)
    theirs.sendall(response)
    theirs.close()
    connection.connection_lost(BrokenPipeError("write"))
    assert (future.result().status, bytes(future.result().body)) == (503, b"later")
    assert not connection.is_usable


@pytest.mark.parametrize(
    ("response", "is_tls"),
    [(b"", False), (b"HTTP/1.1 503 Bu", False), (BUSY[:-1], False), (BUSY, True)],
    ids=["none", "in-the-head", "in-the-body", "TLS"],
)
async def test_an_incomplete_response_is_a_lost_connection(
    ends, response: bytes, is_tls: bool
) -> None:
    ours, theirs = ends
    connection, future = upload(ours, is_tls=is_tls)
    theirs.sendall(response)
    if response:
        theirs.close()
    connection.connection_lost(BrokenPipeError("write"))
    assert isinstance(future.exception(), ConnectionLostError)


async def test_a_closed_socket_is_a_lost_connection() -> None:
    ours, theirs = socket.socketpair()
    connection, future = upload(ours)
    ours.close()
    theirs.close()
    connection.connection_lost(BrokenPipeError("write"))
    assert isinstance(future.exception(), ConnectionLostError)


async def test_a_response_before_a_reset_is_returned() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_head()
        await peer.reader.readexactly(100_000)
        await peer.send(BUSY)
        peer.reset()

    async with serving(script) as (_, origin), opening() as pool:
        for _ in range(20):
            response = await pool.request(origin, b"PUT", b"/", body=bytes(8 * MIB))
            assert response.status == 503
