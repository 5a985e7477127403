"""Large bodies whose destination is one that the kernel copies to slowly."""

from __future__ import annotations

import asyncio
import ctypes

import pytest

from aioflux._http import bounce_buffer as _bounce_buffer
from aioflux._http.bounce_buffer import Bounce, bounce_for
from aioflux._http.connection import Connection
from aioflux._http.errors import ConnectionLostError
from tests.http.oracle import Transport

SIZE = 5 * 1024 * 1024 + 7
BODY = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]


def address_of(view: memoryview | bytearray) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def placed(offset: int, size: int = SIZE) -> memoryview:
    """Memory that begins `offset` bytes behind the start of a page."""
    memory = bytearray(size + 2 * 4096)
    at = (offset - address_of(memory)) % 4096
    return memoryview(memory)[at : at + size]


@pytest.fixture
def affected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounce_buffer, "_is_affected", lambda: True)


@pytest.mark.usefixtures("affected")
@pytest.mark.parametrize(
    ("offset", "size", "expected"),
    [(0, SIZE, False), (1, SIZE, True), (31, SIZE, True), (32, SIZE, False), (16, 100_000, False)],
)
def test_only_large_memory_right_behind_a_page_is_bounced(
    offset: int, size: int, expected: bool
) -> None:
    assert (bounce_for(placed(offset, size)) is not None) is expected


def test_other_processors_need_no_bounce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounce_buffer, "_is_affected", lambda: False)
    assert bounce_for(placed(16)) is None


@pytest.mark.parametrize("done", [0, 1, 63, 64, 4095, 4096, 300_001])
def test_a_bounce_lies_64_bytes_behind_the_source(done: int) -> None:
    room = Bounce().room(done, 10_000_000)
    assert (address_of(room) - done) % 4096 == 64
    assert room.nbytes == 256 * 1024
    assert Bounce().room(done, 5).nbytes == 5


@pytest.mark.parametrize(
    ("vendor", "features", "expected"),
    [
        ("AuthenticAMD", "fpu erms fsrm sse", True),
        ("AuthenticAMD", "fpu erms sse", False),
        ("GenuineIntel", "fpu erms fsrm sse", False),
    ],
)
def test_the_processor_is_told_by_its_features(vendor: str, features: str, expected: bool) -> None:
    told = f"vendor_id\t: {vendor}\nflags\t\t: {features}\n"
    assert _bounce_buffer._is_told_slow(told) is expected
    assert isinstance(_bounce_buffer._is_affected.__wrapped__(), bool)


@pytest.mark.usefixtures("affected")
@pytest.mark.parametrize("offset", [16, 64])
@pytest.mark.parametrize("step", [70_001, 1 << 20])
@pytest.mark.parametrize("num_bytes", [SIZE, SIZE - 9])
async def test_the_bytes_arrive(offset: int, step: int, num_bytes: int) -> None:
    """Whole, and as many as came where the connection ends before."""
    connection = Connection(on_lost=lambda _: None, is_tls=False)
    connection.connection_made(Transport())
    waiter = asyncio.get_running_loop().create_future()
    into = placed(offset)
    connection.send(
        b"GET / HTTP/1.1\r\n\r\n",
        None,
        is_head=False,
        into=into,
        max_body_bytes=None,
        head_seconds=1,
        waiter=waiter,
    )
    stream = memoryview(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE + BODY[:num_bytes])
    seen: set[int] = set()
    while stream:
        room = connection.get_buffer(-1)
        seen.add(room.nbytes)
        piece = stream[: min(len(room), step)]
        room[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        stream = stream[len(piece) :]
    assert (256 * 1024 in seen) is (offset == 16)
    assert into[:num_bytes] == BODY[:num_bytes]
    if num_bytes == SIZE:
        assert (await waiter).num_bytes == SIZE
        assert connection.is_usable
    else:
        connection.eof_received()
        with pytest.raises(ConnectionLostError) as caught:
            await waiter
        assert caught.value.num_bytes_received == num_bytes
        assert into[num_bytes:] == bytes(SIZE - num_bytes)
