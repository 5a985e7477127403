"""Limits of one request: sizes, and time without progress."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def exchanging(**limits: Any) -> Iterator[Callable[..., bytes]]:
    """Send bytes to a server with limits; return all that comes back until it closes.

    The client has its response before the server closes, even if both are slow.
    """
    with GCSServer(buckets=("bucket",), limits=Limits(linger_seconds=60, **limits)) as server:

        def send(*pieces: bytes) -> bytes:
            with socket.create_connection((server.host, server.port), timeout=60) as sock:
                for piece in pieces:
                    sock.sendall(piece)
                received = bytearray()
                while data := sock.recv(1 << 16):
                    received += data
                return bytes(received)

        yield send


@pytest.fixture(scope="module")
def exchange() -> Iterator[Callable[..., bytes]]:
    """With a server that takes little."""
    with exchanging(max_head_bytes=1000, max_body_bytes=200_000) as send:
        yield send


@pytest.fixture(scope="module")
def exchange_soon() -> Iterator[Callable[..., bytes]]:
    """With a server that waits briefly."""
    with exchanging(max_body_bytes=200_000, stalled_seconds=0.2) as send:
        yield send


def put(length: int, *headers: bytes) -> bytes:
    lines = (b"PUT /bucket/k HTTP/1.1", b"Host: h", b"Content-Length: %d" % length, *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def test_head_that_is_too_large_is_431(exchange):
    assert exchange(put(0, b"X: " + b"x" * 2000)).startswith(b"HTTP/1.1 431 ")


def test_head_that_never_ends_is_431(exchange):
    pieces = [b"PUT /bucket/k HTTP/1.1\r\n", *[b"X: %s\r\n" % (b"x" * 100)] * 20]
    assert exchange(*pieces).startswith(b"HTTP/1.1 431 ")


def test_body_that_is_announced_too_large_is_413_before_it_is_sent(exchange):
    response = exchange(put(200_001, b"Expect: 100-continue"))
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"Connection: close" in response


def test_client_that_sends_too_much_still_reads_its_413(exchange):
    assert exchange(put(300_000), bytes(300_000)).startswith(b"HTTP/1.1 413 ")


def test_body_in_http_chunks_is_413_where_it_becomes_too_large(exchange):
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    assert exchange(head, piece * 4).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "pieces",
    [
        (b"G",),
        (b"GET /bucket/k HTTP/1.1\r\nHost:",),
        (put(100), b"half"),
        (put(150_000), bytes(100_000)),
    ],
    ids=["method", "head", "small body", "large body"],
)
def test_half_sent_request_is_408(exchange_soon, pieces):
    assert exchange_soon(*pieces).startswith(b"HTTP/1.1 408 ")


def test_answers_before_a_half_sent_request_come_first(exchange_soon):
    response = exchange_soon(put(1), b"1" + put(100) + b"half")
    assert response.index(b"HTTP/1.1 200") < response.index(b"HTTP/1.1 408")


def test_idle_connection_is_kept():
    limits = Limits(stalled_seconds=0.05)
    with (
        GCSServer(buckets=("bucket",), limits=limits) as server,
        socket.create_connection((server.host, server.port), timeout=60) as sock,
    ):
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)


def test_endless_extension_of_a_piece_is_431(exchange):
    """The framing of a chunked body is bounded like a head."""
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(head, b"1;", b"x" * 2000).startswith(b"HTTP/1.1 431 ")


def test_a_part_of_five_gib_is_allowed(server):
    """The default admits the largest part that GCS takes, and allocates memory as bytes arrive."""
    head = put(5 << 30, b"Expect: 100-continue")
    before = virtual_bytes()
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        sock.sendall(head)
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert virtual_bytes() - before < 1 << 30


def virtual_bytes() -> int:
    """Return the size of this process's address space, where the system says it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0


def test_a_body_in_several_pieces_of_memory_arrives_whole():
    """Of 64 MiB each; the request behind it on the connection is not touched by it."""
    data = bytes(range(251)) * 270_000
    with (
        GCSServer(buckets=("bucket",), md5=False) as server,
        socket.create_connection((server.host, server.port), timeout=60) as sock,
    ):
        following = put(1, b"Connection: close").replace(b"/k", b"/next")
        for piece in (put(len(data)), data, following + b"y"):
            sock.sendall(piece)
        received = b""
        while piece := sock.recv(1 << 16):
            received += piece
        assert received.count(b"HTTP/1.1 200") == 2
        assert (server.get("bucket", "k"), server.get("bucket", "next")) == (data, b"y")


@pytest.mark.parametrize(
    ("target", "start"),
    [(b"/bucket/k", b"<?xml"), (b"/upload/storage/v1/b/bucket/o?name=k", b'{"error":{"code":413')],
)
def test_refusal_has_the_body_of_its_api(exchange, target, start):
    """An error before routing is XML or JSON, like every other one."""
    response = exchange(put(200_001).replace(b"/bucket/k", target))
    assert response.partition(b"\r\n\r\n")[2].startswith(start)


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1 << 20, 5_000_000])
def test_bodies_of_every_size_arrive_whole(server, call, size):
    """Large bodies take another way in; what follows on the connection is not touched by it."""
    data = bytes(number * 7 & 0xFF for number in range(256)) * (size // 256 + 1)
    for number in range(3):
        assert call("PUT", f"/bucket/{number}", data[:size]).status == 200
        assert server.get("bucket", str(number)) == data[:size]


def test_pipelined_large_bodies_arrive_whole(server):
    data = bytes(range(256)) * 1000
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        sock.sendall((put(len(data)) + data) * 3 + put(1, b"Connection: close") + b"1")
        received = b""
        while piece := sock.recv(1 << 16):
            received += piece
    assert received.count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    "name", ["max_head_bytes", "max_body_bytes", "stalled_seconds", "linger_seconds"]
)
def test_limits_under_which_nothing_passes_are_rejected(name):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})
