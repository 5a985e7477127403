"""Memory that becomes bytes without a copy."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._http.memory import LEAST_POOLED_BYTES, BytesBuffer, BytesPool


@given(st.binary(max_size=5000))
def test_what_was_written_is_what_comes_out(data: bytes) -> None:
    buffer = BytesBuffer(len(data))
    assert (buffer.view.nbytes, buffer.view.readonly) == (len(data), False)
    buffer.view[:] = data
    made = buffer.finish()
    assert type(made) is bytes
    assert made == data
    assert hash(made) == hash(data)
    assert made + b"x" == data + b"x"


@given(st.binary(min_size=1, max_size=500), st.integers(0, 500))
def test_what_was_not_filled_is_cut_off(data: bytes, size: int) -> None:
    size = min(size, len(data))
    buffer = BytesBuffer(len(data))
    buffer.view[:] = data
    assert buffer.finish(size) == data[:size]


def test_the_whole_is_handed_out_without_a_copy() -> None:
    buffer = BytesBuffer(100_000)
    buffer.view[:] = bytes(100_000)
    assert buffer.finish() is buffer.finish(100_000)


def test_a_view_outlives_its_buffer() -> None:
    view = BytesBuffer(1_000_000).view
    gc.collect(0)
    view[:5] = b"hello"
    assert bytes(view[:5]) == b"hello"


def test_a_view_ends_where_the_object_ends() -> None:
    view = BytesBuffer(10).view
    with pytest.raises(IndexError):
        view[10] = 1


def test_the_last_byte_can_be_restored() -> None:
    buffer = BytesBuffer(10)
    buffer.recv_view[:] = b"x" * len(buffer.recv_view)
    buffer.restore_end()
    assert buffer.finish() == b"x" * 10
    assert len(buffer.view) == 10
    BytesBuffer(0).restore_end()


SIZE = LEAST_POOLED_BYTES


def filled(pool: BytesPool, byte: bytes, size: int = SIZE) -> bytes:
    buffer = pool.allocate(size)
    buffer.view[:] = byte * size
    return buffer.finish()


async def test_a_released_result_is_the_memory_of_the_next_one() -> None:
    pool = BytesPool(4 * SIZE)
    first = filled(pool, b"a")
    address, old_hash = id(first), hash(first)
    pool.offer(first)
    del first
    second = filled(pool, b"b")
    assert id(second) == address
    assert second == b"b" * SIZE
    assert hash(second) == hash(b"b" * SIZE) != old_hash
    pool.clear()


@pytest.mark.parametrize("hold", [lambda data: data, memoryview, lambda data: [data]])
async def test_a_result_that_is_still_referenced_is_not_written_again(hold: Any) -> None:
    pool = BytesPool(4 * SIZE)
    first = filled(pool, b"a")
    pool.offer(first)
    held = hold(first)
    del first
    filled(pool, b"b")
    assert bytes(held[0] if isinstance(held, list) else held) == b"a" * SIZE
    pool.clear()


async def test_a_pool_holds_objects_of_one_size_up_to_its_limit() -> None:
    pool = BytesPool(2 * SIZE)
    for byte in (b"a", b"b", b"c"):
        pool.offer(byte * SIZE)
    assert list(pool._offered) == [b"b" * SIZE, b"c" * SIZE]
    pool.offer(b"d" * (2 * SIZE))
    assert list(pool._offered) == [b"d" * (2 * SIZE)]
    pool.clear()


async def test_an_idle_pool_releases_its_memory() -> None:
    pool = BytesPool(2 * SIZE)
    pool.offer(b"a" * SIZE)
    pool._on_timer()
    assert pool._offered  # offered since the timer was started
    pool._on_timer()
    assert not pool._offered


_FAULTS = """
import resource
from aioflux._http.memory import BytesPool

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        objects = [b"x" * (1 << 20) for _ in range(8)]
        del objects
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
BytesPool(1)
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds of glibc")
def test_with_a_pool_the_allocator_retains_freed_memory() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", _FAULTS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 20 * 8 * 256 / 2  # 8 MiB of pages in each round
    assert after < before / 20


_LIMITED = """
import resource
from aioflux._http.memory import BytesPool

num_pages = int(open("/proc/self/statm").read().split()[0])
limit = num_pages * resource.getpagesize() + 8 * 1024 * 1024
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
BytesPool(1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_pool_needs_no_large_address_space() -> None:
    subprocess.run([sys.executable, "-c", _LIMITED], check=True)
