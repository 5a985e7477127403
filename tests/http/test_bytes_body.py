"""A `bytes` body is received with room for one byte more, which is never part of it."""

from __future__ import annotations

import ctypes

import pytest

from tests.http.oracle import FedConnection

SIZE = 100_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE


async def receive(stream: bytes, *, step: int) -> tuple[bytes, bool]:
    """Feed a response in pieces of `step` bytes at most, as a loop does.

    Returns:
        The body, and whether the connection is usable after it.
    """
    fed = FedConnection()
    future = fed.queue(into=bytes)
    fed.connection.flush()
    fed.feed(stream, range(step, len(stream), step))
    return (await future).body, fed.connection.is_usable


@pytest.mark.parametrize("step", [1000, 70_000, 1 << 20])
@pytest.mark.parametrize("junk", [b"", b"!", b"!!"])
async def test_bytes_after_a_body_are_not_part_of_it(step: int, junk: bytes) -> None:
    body = bytes(range(250)) * (SIZE // 250)
    got, is_usable = await receive(HEAD + body + junk, step=step)
    assert got == body
    end = id(got) + bytes.__basicsize__ - 1 + SIZE
    assert ctypes.string_at(end, 1) == b"\0"
    if step > SIZE and junk:  # received together with the end of the body
        assert not is_usable
