"""Requests between `send` and `flush`, and bytes received before they are written."""

from __future__ import annotations

import asyncio

import pytest

from aioflux._http import Connection, ConnectionLostError
from tests.http.oracle import Transport

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"


def feed(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def start(connection: Connection) -> asyncio.Future:
    future = asyncio.get_running_loop().create_future()
    connection.send(
        b"GET / HTTP/1.1\r\n\r\n",
        None,
        is_head=False,
        into=bytes,
        max_body_bytes=None,
        head_seconds=1,
        future=future,
    )
    return future


def opened(transport: Transport) -> Connection:
    connection = Connection(on_lost=lambda _: None, is_tls=False)
    connection.connection_made(transport)
    return connection


async def test_a_response_before_the_request_is_written_is_not_its_response() -> None:
    connection = opened(Transport())
    first = start(connection)
    connection.flush()
    feed(connection, RESPONSE)
    assert (await first).body == b"a"
    second = start(connection)
    feed(connection, RESPONSE)  # sent by a broken server after its first response
    with pytest.raises(ConnectionLostError, match="before the request"):
        await second
    assert not connection.is_usable
    assert connection.is_stale  # so that it is sent again at once, over another
    assert not connection.fully_sent


async def test_an_aborted_request_is_not_written() -> None:
    transport = Transport()
    connection = opened(transport)
    start(connection)
    connection.abort()
    connection.flush()
    assert not transport.sent


async def test_a_write_that_fails_fails_its_own_request() -> None:
    class Closed(Transport):
        def write(self, data: bytes) -> None:
            raise RuntimeError("handle closed")

    connection = opened(Closed())
    future = start(connection)
    connection.flush()
    with pytest.raises(RuntimeError, match="handle closed"):
        await future
