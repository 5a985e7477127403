"""A server in memory, and raw HTTP to it."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from aioflux.testing import GCSServer


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


Call = Callable[..., Answer]


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


@pytest.fixture
def call(server: GCSServer) -> Iterator[Call]:
    """Send requests over one kept-alive connection."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)

    def send(method: str, target: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, named)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())

    yield send
    connection.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[GCSServer]:
    """One server for all tests of a module, each of which takes a bucket of its own: `name`."""
    with GCSServer() as running:
        yield running


@pytest.fixture
def name(shared: GCSServer) -> str:
    """The name of an empty bucket."""
    bucket = f"bucket-{len(shared.state.buckets)}"
    shared.create_bucket(bucket)
    return bucket
