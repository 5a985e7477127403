"""HTTP/1.1 as the server speaks it, and how it can be made to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook, Request, Response
from aioflux.testing.gcs_server._delivery import BEFORE_HEAD, Cut, Delivery, Send, Wait, steps
from aioflux.testing.gcs_server._download import may_stay_compressed, parse_range
from tests.gcs_server.conftest import begin

GET = b"GET /bucket/%s HTTP/1.1\r\nHost: h\r\n\r\n"


def exchange(server: GCSServer, *pieces: bytes) -> bytes:
    """Send bytes, then half-close, and return all that comes back."""
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        for piece in pieces:
            sock.sendall(piece)
        with contextlib.suppress(OSError):  # reset already: `recv` says so
            sock.shutdown(socket.SHUT_WR)
        received = bytearray()
        while data := sock.recv(1 << 20):
            received += data
        return bytes(received)


class Deliver(Hook):
    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.sent: list[str] = []

    def after(self, request, response):
        response.delivery = self.delivery
        return response

    def finished(self, request, response):
        self.sent.append(request.match.operation)


def test_pipelined_requests_are_answered_in_order(server):
    for number in range(100):
        server.put("bucket", str(number), b"<%d>" % number)
    received = exchange(server, b"".join(GET % str(n).encode() for n in range(100)))
    places = [received.index(b"<%d>" % n) for n in range(100)]
    assert places == sorted(places)


def test_large_pipelined_bodies_arrive_whole(server):
    data = bytes(20 << 20)
    server.put("bucket", "large", data)
    received = exchange(server, (GET % b"large") * 3)
    assert received.count(b"HTTP/1.1 200") == 3
    assert received.count(b"\0") == 3 * len(data)


def test_body_in_http_chunks(server):
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    received = exchange(server, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert server.get("bucket", "k") == b"abcde"


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("size", [3, 300_000])
def test_body_behind_an_offer_of_another_protocol_is_stored(server, size):
    """The offer is ignored: neither the body nor the next request is taken for the protocol."""
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n" % (H2C, size)
    received = exchange(server, head + b"x" * size + GET % b"k")
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert server.get("bucket", "k") == b"x" * size


def test_pipelined_requests_that_offer_another_protocol_are_all_answered(server):
    """Requests after one with an Upgrade header are parsed as HTTP/1.1."""
    server.put("bucket", "k", b"data")
    get = b"GET /bucket/k HTTP/1.1\r\nHost: h\r\n%b\r\n" % H2C
    assert exchange(server, get * 3).count(b"\r\n\r\ndata") == 3


def test_body_in_pieces_behind_an_offer_of_another_protocol_is_stored(server):
    """Transfer-Encoding counts as it does without the offer."""
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: h\r\n%bTransfer-Encoding: chunked\r\n\r\n" % H2C
    assert b" 200 OK" in exchange(server, head, b"3\r\nabc\r\n0\r\n\r\n")
    assert server.get("bucket", "k") == b"abc"


def test_connect_is_rejected(server):
    """A tunnel is never opened, and what would go through it is no request."""
    received = exchange(server, b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n" + GET % b"k")
    assert received.startswith(b"HTTP/1.1 405 ")
    assert received.count(b"HTTP/1.1") == 1


def test_expect_continue_is_answered_before_the_body(server):
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        sock.sendall(head)
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"abc")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_garbage_is_400_after_the_answers_before_it(server):
    server.put("bucket", "k", b"data")
    received = exchange(server, GET % b"k", b"!!garbage\r\n\r\n")
    assert received.index(b"data") < received.index(b"HTTP/1.1 400")


@pytest.mark.parametrize("head", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"])
def test_connection_is_closed_on_request(server, head):
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        sock.sendall(b"GET /storage/v1/b/bucket " + head + b"\r\n")
        received = b""
        while data := sock.recv(1 << 16):
            received += data
    assert b"Connection: close" in received


def test_undecodable_target_is_400(server):
    assert b" 400 " in exchange(server, GET % b"%ff")


def test_steps_of_a_delivery():
    assert list(steps(5, None)) == [Send(0, 0), Send(0, 5)]
    assert list(steps(5, Delivery(cut_at=BEFORE_HEAD, reset=True))) == [Cut(reset=True)]
    plan = Delivery(delay_seconds=1, stall_at=2, stall_seconds=3, cut_at=4)
    assert list(steps(5, plan)) == [
        Wait(1),
        Send(0, 0),
        Send(0, 2),
        Wait(3),
        Send(2, 4),
        Cut(reset=False),
    ]


def test_truncation(server):
    server.put("bucket", "k", b"abcdef")
    hook = Deliver(Delivery(cut_at=3))
    server.app.hooks = (hook,)
    assert exchange(server, GET % b"k").endswith(b"\r\n\r\nabc")
    assert hook.sent == ["xml.objects.get"]


@pytest.mark.parametrize("cut_at", [BEFORE_HEAD, 2 << 20])
def test_reset(server, cut_at):
    server.put("bucket", "k", bytes(4 << 20))
    server.app.hooks = (Deliver(Delivery(cut_at=cut_at, reset=True)),)
    with pytest.raises(ConnectionResetError):
        exchange(server, GET % b"k")


def test_delay_and_pace_hold_up_only_their_own_connection(server):
    server.put("bucket", "k", bytes(20_000))
    held_up = []
    for delivery in (Delivery(delay_seconds=1e3), Delivery(bytes_per_second=1)):
        server.app.hooks = (server.stats, Deliver(delivery))
        held_up.append(begin(server, "GET", "/bucket/k"))
        server.app.hooks = (server.stats,)
        assert exchange(server, GET % b"k").endswith(bytes(20_000))
        assert server.stats.total.in_flight == len(held_up)
    for connection in held_up:
        connection.close()


def test_delay_and_pace_take_their_time(server):
    server.put("bucket", "k", bytes(20_000))
    server.app.hooks = (Deliver(Delivery(delay_seconds=0.1, bytes_per_second=100_000)),)
    began = time.monotonic()
    assert exchange(server, GET % b"k").endswith(bytes(20_000))
    assert time.monotonic() - began > 0.25


def test_stop_ends_open_connections_and_the_thread():
    before = set(threading.enumerate())
    with GCSServer(buckets=("bucket",)) as server:
        server.put("bucket", "k", b"data")
        sock = socket.create_connection((server.host, server.port), timeout=60)
        sock.sendall(GET % b"k")
        assert sock.recv(10_000)
    with sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    # Its own thread: a server of another test may still run in this process.
    assert {each for each in threading.enumerate() if each.name == "GCSServer"} <= before


async def test_serves_from_the_running_loop():
    async with GCSServer(buckets=("bucket",)) as server:
        server.put("bucket", "k", b"data")
        received = await asyncio.to_thread(exchange, server, GET % b"k")
    assert received.endswith(b"data")


class Failing(Hook):
    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ValueError(where)

    def before(self, request):
        self._fail("before")

    def after(self, request, response):
        self._fail("after")
        return response

    def finished(self, request, response):
        self._fail("finished")


@pytest.mark.parametrize(("where", "status"), [("before", 500), ("after", 500), ("finished", 200)])
def test_a_hook_that_fails_does_not_end_the_connection(server, where, status):
    """The response is 500, and later requests are answered, too."""
    server.put("bucket", "k", b"data")
    server.app.hooks = (Failing(where),)
    assert exchange(server, GET % b"k" * 2).count(b"HTTP/1.1 %d " % status) == 2


@pytest.mark.parametrize("status", [199, 299, 599, 999])
def test_any_status_has_a_status_line(status):
    """Codes that HTTP does not name are sent, too."""
    assert Response(status=status).head().startswith(b"HTTP/1.1 %d " % status)


def test_headers_are_utf8_or_latin1():
    """As GCS reads them; no byte makes a header unreadable."""
    request = Request("GET", b"/", [(b"X", "é€".encode()), (b"Y", b"\xe9")])
    assert request.headers == {"x": "é€", "y": "é"}


def test_http_1_0_gets_no_100(server):
    """An older client does not know of it: RFC 9110, 10.1.1."""
    head = b"PUT /bucket/k HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    assert exchange(server, head, b"abc").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("unit", ["Bytes", "BYTES"])
def test_range_units_have_no_case(unit):
    """RFC 9110, 14.1."""
    assert parse_range(f"{unit}=0-1", 10) == (0, 2)


def test_a_range_of_absurd_length_is_ignored():
    """It is no number that Python reads."""
    assert parse_range(f"bytes={'9' * 5000}-", 10) is None


@pytest.mark.parametrize(
    ("header", "stays"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("gzip; q=1", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, br", False),
        ("gzipped", False),
        ("", False),
    ],
)
def test_gzip_of_quality_0_is_not_accepted(server, header, stays):
    """RFC 9110, 12.4.2."""
    server.put("bucket", "k", b"x")
    record = server.state.get("bucket", "k")
    assert may_stay_compressed({"accept-encoding": header}, record) is stays
