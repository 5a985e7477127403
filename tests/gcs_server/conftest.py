"""Fixtures: a server in memory, and plain HTTP requests to it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from aioflux.testing import GCSServer


@dataclass(frozen=True)
class Received:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


Call = Callable[..., Received]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until the thread of a server makes a condition true, for up to 60 s."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def begin(server: GCSServer, *request: object, **options: object) -> http.client.HTTPConnection:
    """Send a request, and return its connection when the server has received the request."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    num_before = server.stats.total.in_flight
    connection.request(*request, **options)  # type: ignore[arg-type]
    wait_until(lambda: server.stats.total.in_flight > num_before)
    return connection


def hush(connection: http.client.HTTPConnection) -> None:
    """Shorten the timeout of reads, for checks that the server sends nothing."""
    assert connection.sock is not None
    connection.sock.settimeout(0.2)


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


@pytest.fixture
def call(server: GCSServer) -> Iterator[Call]:
    """Send requests over one kept-alive connection."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)

    def send(method: str, target: str, body: bytes | None = None, **headers: str) -> Received:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, named)
        response = connection.getresponse()
        return Received(response.status, response.headers, response.read())

    yield send
    connection.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[GCSServer]:
    """One server for all tests of a module; each test has its own bucket, `name`."""
    with GCSServer() as running:
        yield running


@pytest.fixture
def name(shared: GCSServer) -> str:
    """The name of an empty bucket."""
    bucket = f"bucket-{len(shared.state.buckets)}"
    shared.create_bucket(bucket)
    return bucket
