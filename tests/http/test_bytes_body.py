"""A `bytes` body is received with room for one byte more, which is never part of it."""

from __future__ import annotations

import asyncio
import ctypes

import pytest

from aioflux._http import Connection
from aioflux._http.memory import BytesBuffer
from tests.http.oracle import Transport

SIZE = 100_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE


async def receive(stream: bytes, *, step: int) -> tuple[bytes, Connection]:
    """Feed a response in pieces of `step` bytes at most, as a loop does."""
    connection = Connection(on_lost=lambda _: None, is_tls=False)
    connection.connection_made(Transport())
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
    connection.flush()
    start = 0
    while start < len(stream) and not future.done():
        buffer = connection.get_buffer(-1)
        num_bytes = min(len(buffer), step, len(stream) - start)
        buffer[:num_bytes] = stream[start : start + num_bytes]
        connection.buffer_updated(num_bytes)
        start += num_bytes
    return (await future).body, connection


@pytest.mark.parametrize("step", [1000, 70_000, 1 << 20])
@pytest.mark.parametrize("junk", [b"", b"!", b"!!"])
async def test_bytes_after_a_body_are_not_part_of_it(step: int, junk: bytes) -> None:
    body = bytes(range(250)) * (SIZE // 250)
    got, connection = await receive(HEAD + body + junk, step=step)
    assert got == body
    end = id(got) + bytes.__basicsize__ - 1 + SIZE
    assert ctypes.string_at(end, 1) == b"\0"
    if step > SIZE and junk:  # received together with the end of the body
        assert not connection.is_usable


def test_the_last_byte_can_be_restored() -> None:
    buffer = BytesBuffer(10)
    buffer.recv_view[:] = b"x" * len(buffer.recv_view)
    buffer.restore_end()
    assert buffer.finish() == b"x" * 10
    assert len(buffer.view) == 10
    BytesBuffer(0).restore_end()
