"""Large slices of a body are written to the socket itself, and the rest by the transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from aioflux._http.errors import ConnectionLostError, StalledError
from tests.http.oracle import FedConnection, Transport
from tests.http.pools import MIB, SHORT, opening
from tests.http.scripted import Peer, echoing, ok, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.asyncio

HEAD = b"PUT / HTTP/1.1\r\n\r\n"
LARGE = bytes(range(256)) * 4096 * 3


class Direct(Transport):
    """A transport over a socket, whose buffer keeps all that is written to it."""

    def __init__(self, ours: socket.socket, num_buffered: int = 0) -> None:
        super().__init__()
        self.ours = ours
        self.num_buffered = num_buffered

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.ours if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return self.num_buffered + len(self.sent)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def received(theirs: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while piece := theirs.recv(MIB):
            data += piece
    return data


def upload(transport: Transport, *pieces: bytes, is_tls: bool = False) -> None:
    FedConnection(transport, is_tls=is_tls).send(HEAD, pieces)


@pytest.mark.parametrize(
    "pieces",
    [(LARGE,), (b"", LARGE[:5], b"", LARGE[5:]), tuple(LARGE[i::600] for i in range(600))],
    ids=["one", "empty", "many"],
)
async def test_the_transport_writes_the_rest_of_a_partial_write(ends, pieces) -> None:
    ours, theirs = ends
    upload(transport := Direct(ours), *pieces)
    direct = received(theirs)
    assert direct
    assert transport.sent
    assert direct + transport.sent == HEAD + b"".join(pieces)


async def test_the_transport_writes_all_if_the_kernels_buffer_is_full(ends) -> None:
    ours, theirs = ends
    with contextlib.suppress(BlockingIOError):
        while ours.send(bytes(MIB)):
            pass
    upload(transport := Direct(ours), LARGE)
    assert transport.sent == HEAD + LARGE
    assert not any(received(theirs))


@pytest.mark.parametrize("case", ["buffered", "closing", "TLS", "small", "many pieces"])
async def test_the_transport_alone_writes(ends, case) -> None:
    """Bytes in its buffer go first; the kernel rejects more than 1,024 pieces."""
    ours, theirs = ends
    transport = Direct(ours, num_buffered=int(case == "buffered"))
    transport.is_aborted = case == "closing"
    pieces = [LARGE[:100_000] if case == "small" else LARGE]
    if case == "many pieces":
        pieces = [LARGE[i : i + 500] for i in range(0, MIB, 500)]
    upload(transport, *pieces, is_tls=case == "TLS")
    assert received(theirs) == b""
    assert transport.sent == HEAD + b"".join(pieces)


@pytest.mark.parametrize("is_ours", [False, True], ids=["peer", "ours"])
async def test_the_transport_reports_the_error_of_a_closed_socket(ends, is_ours: bool) -> None:
    ends[0 if is_ours else 1].close()
    upload(transport := Direct(ends[0]), LARGE)
    assert transport.sent == HEAD + LARGE


# Faults of the server in the middle of a body of 32 MiB.


async def slow(peer: Peer) -> None:
    await peer.read_head()
    body = bytearray()
    while len(body) < len(BODY):
        body += await peer.reader.read(1_000_000)
        await asyncio.sleep(0)
    await peer.send(ok(b"same" if body == BODY else b"different"))


async def resetting(peer: Peer) -> None:
    await peer.reader.readexactly(5 * MIB)
    peer.reset()


async def closing(peer: Peer) -> None:
    await peer.reader.readexactly(5 * MIB)
    peer.writer.close()


async def stalling(peer: Peer) -> None:
    await peer.reader.readexactly(5 * MIB)
    peer.reader._transport.pause_reading()
    await peer.writer.wait_closed()


BODY = LARGE * 10 + LARGE[: 2 * MIB]


async def test_a_slow_server_receives_the_body() -> None:
    async with serving(slow) as (_, origin), opening() as pool:
        assert bytes((await pool.request(origin, b"PUT", b"/", body=BODY)).body) == b"same"


@pytest.mark.parametrize(
    ("script", "error"),
    [(resetting, ConnectionLostError), (closing, ConnectionLostError), (stalling, StalledError)],
)
async def test_a_fault_is_an_error_and_the_pool_stays_usable(script, error) -> None:
    async with serving(script, echoing) as (server, origin), opening(timeouts=SHORT) as pool:
        with pytest.raises(error) as raised:
            await pool.request(origin, b"PUT", b"/", body=BODY)
        assert raised.value.request_sent
        assert bytes((await pool.request(origin, b"PUT", b"/", body=LARGE)).body) == LARGE
        server.close_connections()
