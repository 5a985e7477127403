"""TCP segments: responses in several, and requests in one."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

import pytest

from aioflux._http.codec import Origin
from tests.http.pools import opening

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from tests.http.authority import Authority

pytestmark = pytest.mark.asyncio

NUM_REQUESTS = 100
DELAYED_SECONDS = 0.04
"""Linux delays an acknowledgement by this much unless TCP_QUICKACK is set."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
RESPONSES = {
    "small": [HEAD % 10, b"0123456789"],
    "head-in-two": [b"HTTP/1.1 200 OK\r\n", b"Content-Length: 2\r\n\r\n", b"01"],
    "body-in-two": [HEAD % 4, b"01", b"23"],
    "chunked": [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"2\r\n01\r\n",
        b"2\r\n23\r\n",
        b"0\r\n\r\n",
    ],
}


@asynccontextmanager
async def sending(
    pieces: Sequence[bytes], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Origin]:
    """A server that responds in pieces, each of which waits for the one before (Nagle)."""

    def talk(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        conn = accepted if tls is None else tls.wrap_socket(accepted, server_side=True)
        with closing(conn):
            for _ in range(NUM_REQUESTS):
                while not conn.recv(65536).endswith(b"\r\n\r\n"):
                    pass
                for piece in pieces:
                    conn.sendall(piece)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        talking = asyncio.create_task(asyncio.to_thread(talk, listener))
        host = "127.0.0.1" if tls is None else "localhost"
        yield Origin("http" if tls is None else "https", host, listener.getsockname()[1])
        await talking


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("pieces", RESPONSES.values(), ids=RESPONSES)
async def test_a_response_in_pieces_does_not_wait_for_a_delayed_acknowledgement(
    authority: Authority, pieces: list[bytes], *, is_tls: bool
) -> None:
    """Each request would last one delay at least."""
    server = authority.server_context() if is_tls else None
    client = authority.client_context() if is_tls else None
    async with (
        sending(pieces, server) as origin,
        opening(max_idle=1, ssl_context=client) as pool,
    ):
        begun = time.monotonic()
        for _ in range(NUM_REQUESTS):
            await pool.request(origin, b"GET", b"/a", into=bytes)
        seconds = time.monotonic() - begun
    assert seconds < NUM_REQUESTS * DELAYED_SECONDS / 2


async def test_head_and_small_body_of_a_request_leave_in_one_segment() -> None:
    """A server that delays its own acknowledgements does not delay them, either."""
    received: list[bytes] = []

    def talk(listener: socket.socket) -> None:
        conn, _ = listener.accept()
        with closing(conn):
            for _ in range(NUM_REQUESTS):
                received.append(conn.recv(65536))
                conn.sendall(HEAD % 0)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        origin = Origin("http", "127.0.0.1", listener.getsockname()[1])
        talking = asyncio.create_task(asyncio.to_thread(talk, listener))
        async with opening(max_idle=1) as pool:
            for _ in range(NUM_REQUESTS):
                await pool.request(origin, b"PUT", b"/a", body=b"small body")
        await talking
    assert [data.endswith(b"\r\n\r\nsmall body") for data in received] == [True] * NUM_REQUESTS
