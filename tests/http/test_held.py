"""Requests that wait for the end of the loop's turn, and bytes that come before they have left."""

from __future__ import annotations

import asyncio

import pytest

from aioflux._http.connection import Connection
from aioflux._http.errors import ConnectionLostError
from tests.http.oracle import Transport

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"


def feed(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def begin(connection: Connection) -> asyncio.Future:
    waiter = asyncio.get_running_loop().create_future()
    connection.send(
        b"GET / HTTP/1.1\r\n\r\n",
        None,
        is_head=False,
        into=bytes,
        max_body_bytes=None,
        head_seconds=1,
        waiter=waiter,
        is_held=True,
    )
    return waiter


@pytest.fixture
async def connection() -> Connection:
    opened = Connection(on_lost=lambda _: None, is_tls=False)
    opened.connection_made(Transport())
    return opened


async def test_an_answer_before_the_request_has_left_is_not_its_answer(
    connection: Connection,
) -> None:
    first = begin(connection)
    connection.write_held()
    feed(connection, ANSWER)
    assert (await first).body == b"a"
    second = begin(connection)
    feed(connection, ANSWER)  # what a broken server sends behind its first answer
    with pytest.raises(ConnectionLostError, match="nobody had asked for"):
        await second
    assert not connection.is_usable
    assert connection.is_stale  # so that it is sent again at once, over another
    assert not connection.request_left


async def test_a_request_that_was_dropped_does_not_leave(connection: Connection) -> None:
    begin(connection)
    connection.abort()
    connection.write_held()
    assert connection._held == b""


async def test_a_write_that_fails_is_that_of_its_own_request(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(data: bytes) -> None:
        raise RuntimeError("handle closed")

    waiter = begin(connection)
    monkeypatch.setattr(connection._transport, "write", refuse)
    connection.write_held()
    with pytest.raises(RuntimeError, match="handle closed"):
        await waiter
