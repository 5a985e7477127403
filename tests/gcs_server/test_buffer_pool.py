"""Memory of large bodies: reused once no view of it exists, and never before."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import _buffer_pool
from aioflux.testing.gcs_server._buffer_pool import allocate, is_owned

MIB = 1 << 20
SIZE = 5 * MIB + 7


@pytest.fixture(autouse=True)
def nothing_idle(monkeypatch):
    """As if one server ran, whatever other tests run."""
    monkeypatch.setattr(_buffer_pool, "_idle", deque())
    monkeypatch.setattr(_buffer_pool, "_servers", {0})


def filled(letter: bytes, size: int = SIZE) -> memoryview:
    view = allocate(size)
    assert isinstance(view, memoryview)
    view[:] = letter * size
    return view


@pytest.mark.parametrize("size", [1, 4 * MIB - 1, 4 * MIB, SIZE])
def test_memory_is_owned_and_of_the_size_asked(size):
    memory = allocate(size)
    assert len(memory) == size
    assert is_owned(memory)
    assert is_owned(memoryview(memory)[1:]) == (size >= 4 * MIB)
    assert not is_owned(memoryview(bytes(10)))


def test_a_block_is_used_again_once_its_last_view_is_gone():
    last = filled(b"a")[-10:]
    assert not _buffer_pool._idle
    second = filled(b"b")
    assert bytes(last) == b"a" * 10
    del second
    assert len(_buffer_pool._idle) == 1
    third = allocate(5 * MIB)  # of the same number of huge pages
    assert (bytes(third[:1]), len(_buffer_pool._idle)) == (b"b", 0)
    del last
    assert len(_buffer_pool._idle) == 1


def test_a_block_of_another_size_stays_idle():
    filled(b"a")
    filled(b"b", 9 * MIB)
    assert [len(block) for block in _buffer_pool._idle] == [6 * MIB, 10 * MIB]


def test_what_is_idle_is_bounded(monkeypatch):
    monkeypatch.setattr(_buffer_pool, "_IDLE_BYTES", 16 * MIB)
    views = [filled(b"a") for _ in range(4)]
    views.append(filled(b"b", 9 * MIB))
    del views
    assert sum(map(len, _buffer_pool._idle)) <= 16 * MIB
    assert _buffer_pool._idle


def test_threads_never_share_a_block():
    def work(letter: bytes) -> None:
        for _ in range(50):
            view = filled(letter, 4 * MIB)
            if bytes(view[:: MIB // 2]) != letter * 8:
                failed.append(letter)
            del view

    failed: list[bytes] = []
    threads = [threading.Thread(target=work, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(_buffer_pool._idle) <= 3


def test_an_object_keeps_its_bytes_while_others_come_and_go(server, call):
    assert call("PUT", "/bucket/kept", b"k" * SIZE).status == 200
    for letter in (b"a", b"b", b"c"):
        assert call("PUT", "/bucket/other", letter * SIZE).status == 200
    assert _buffer_pool._idle
    assert server.get("bucket", "kept") == b"k" * SIZE
    assert server.get("bucket", "other") == b"c" * SIZE


def test_nothing_is_kept_when_the_last_server_has_stopped(monkeypatch):
    monkeypatch.setattr(_buffer_pool, "_servers", set())
    with GCSServer() as first, GCSServer() as second:
        view = filled(b"a")
        filled(b"b")
        first.stop()
        assert len(_buffer_pool._idle) == 1
        second.stop()
        assert not _buffer_pool._idle
        del view
        assert not _buffer_pool._idle
        first.start()
        filled(b"c")
        assert len(_buffer_pool._idle) == 1
    assert not _buffer_pool._idle


async def test_a_server_of_the_callers_loop_keeps_blocks_too(monkeypatch):
    """As `aioflux serve` runs it."""
    monkeypatch.setattr(_buffer_pool, "_servers", set())
    async with GCSServer():
        filled(b"a")
        assert len(_buffer_pool._idle) == 1
    assert not _buffer_pool._idle
