"""Memory of large bodies: reused once no view of it exists, and never before."""

from __future__ import annotations

import threading

import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server._buffer_pool import BufferPool, is_owned

MIB = 1 << 20
SIZE = 5 * MIB + 7


@pytest.fixture
def pool() -> BufferPool:
    """The memory of a running server that keeps 16 MiB."""
    pool = BufferPool(max_idle_bytes=16 * MIB)
    pool.start()
    return pool


def filled(pool: BufferPool, letter: bytes, size: int = SIZE) -> memoryview:
    view = pool.allocate(size)
    assert isinstance(view, memoryview)
    view[:] = letter * size
    return view


@pytest.mark.parametrize("size", [1, 4 * MIB - 1, 4 * MIB, SIZE])
def test_memory_is_owned_and_of_the_size_requested(pool, size):
    memory = pool.allocate(size)
    assert len(memory) == size
    assert is_owned(memory)
    assert is_owned(memoryview(memory)[1:]) == (size >= 4 * MIB)
    assert not is_owned(memoryview(bytes(10)))


def test_a_block_is_used_again_once_its_last_view_is_gone(pool):
    last = filled(pool, b"a")[-10:]
    assert not pool.idle_bytes
    second = filled(pool, b"b")
    assert bytes(last) == b"a" * 10
    del second
    assert pool.idle_bytes == 6 * MIB
    third = pool.allocate(5 * MIB)  # of the same number of huge pages
    assert (bytes(third[:1]), pool.idle_bytes) == (b"b", 0)
    del last
    assert pool.idle_bytes == 6 * MIB


def test_a_block_of_another_size_stays_idle(pool):
    filled(pool, b"a")
    filled(pool, b"b", 9 * MIB)
    assert pool.idle_bytes == (6 + 10) * MIB


def test_idle_memory_is_bounded(pool):
    views = [filled(pool, b"a") for _ in range(4)]
    views.append(filled(pool, b"b", 9 * MIB))
    del views
    assert 0 < pool.idle_bytes <= 16 * MIB


def test_threads_never_share_a_block(pool):
    def work(letter: bytes) -> None:
        for _ in range(50):
            view = filled(pool, letter, 4 * MIB)
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
    assert pool.idle_bytes <= 3 * 4 * MIB


def test_an_object_keeps_its_bytes_while_others_come_and_go(server, call):
    assert call("PUT", "/bucket/kept", b"k" * SIZE).status == 200
    for letter in (b"a", b"b", b"c"):
        assert call("PUT", "/bucket/other", letter * SIZE).status == 200
    assert server.app.buffers.idle_bytes
    assert server.get("bucket", "kept") == b"k" * SIZE
    assert server.get("bucket", "other") == b"c" * SIZE


def test_nothing_is_kept_when_the_server_has_stopped():
    with GCSServer() as server:
        pool = server.app.buffers
        view = filled(pool, b"a")
        filled(pool, b"b")
        assert pool.idle_bytes == 6 * MIB
        server.stop()
        assert not pool.idle_bytes
        del view
        assert not pool.idle_bytes
        server.start()
        filled(pool, b"c")
        assert pool.idle_bytes == 6 * MIB
    assert not pool.idle_bytes


async def test_a_server_of_the_callers_loop_keeps_blocks_too():
    """As `aioflux serve` runs it."""
    async with GCSServer() as server:
        filled(server.app.buffers, b"a")
        assert server.app.buffers.idle_bytes == 6 * MIB
    assert not server.app.buffers.idle_bytes
