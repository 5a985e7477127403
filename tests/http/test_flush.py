"""Requests between `send` and `flush`, and bytes received before they are written."""

from __future__ import annotations

import pytest

from aioflux._http.errors import ConnectionLostError
from tests.http.oracle import FedConnection, Transport

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"


async def test_a_response_before_the_request_is_written_is_not_its_response() -> None:
    fed = FedConnection()
    connection = fed.connection
    first = fed.queue()
    connection.flush()
    fed.feed(RESPONSE, cuts=[])
    assert (await first).body == b"a"
    second = fed.queue()
    fed.feed(RESPONSE, cuts=[])  # sent by a broken server after its first response
    with pytest.raises(ConnectionLostError, match="before the request"):
        await second
    assert not connection.is_usable
    assert connection.is_stale  # so that it is sent again at once, over another
    assert not connection.fully_sent


async def test_an_aborted_request_is_not_written() -> None:
    fed = FedConnection()
    fed.queue()
    fed.connection.abort()
    fed.connection.flush()
    assert not fed.transport.sent


async def test_a_write_that_fails_fails_its_own_request() -> None:
    class Closed(Transport):
        def write(self, data: bytes) -> None:
            raise RuntimeError("handle closed")

    future = FedConnection(Closed()).send(b"PUT / HTTP/1.1\r\n\r\n", [])
    with pytest.raises(RuntimeError, match="handle closed"):
        await future
