"""CRC32C of any memory, and of a whole from its parts."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from array import array

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._values import checksums
from aioflux._values.checksums import (
    _extend_by_window,
    _extend_without_gil,
    _load_extend,
    combine_crc32c,
    crc32c,
    crc32c_blocks,
    join_crc32c,
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
    ids=["empty", "digits", "zeros", "ones", "rising"],
)
def test_published_values(data: bytes, expected: int) -> None:
    # RFC 3720, appendix B.4, and the check value of CRC-32C.
    assert crc32c(data) == expected


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_048_576, 1_200_001])
def test_every_kind_of_memory_gives_the_same(size: int) -> None:
    data = bytes(at % 251 for at in range(size))
    expected = crc32c(data)
    writable = bytearray(data)
    assert crc32c(writable) == expected
    assert crc32c(memoryview(writable)) == expected
    assert crc32c(memoryview(data)) == expected
    assert crc32c(memoryview(b"xx" + data)[2:]) == expected
    writable.append(0)  # no view of it is held


def test_items_of_any_format_are_bytes() -> None:
    numbers = array("d", [1.5, -2.0])
    assert crc32c(memoryview(numbers)) == crc32c(numbers.tobytes())


@given(st.binary(max_size=300), st.integers(0, 300))
def test_it_goes_on_from_what_came_before(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_parts_combine_to_the_whole(parts: list[bytes]) -> None:
    combined = 0
    for part in parts:
        combined = combine_crc32c(combined, crc32c(part), len(part))
    assert combined == crc32c(b"".join(parts))


@given(st.binary(min_size=1, max_size=50), st.integers(1, 2**40), st.integers(1, 2**40))
def test_combining_is_associative_for_any_length(data: bytes, second: int, third: int) -> None:
    value = crc32c(data)
    left = combine_crc32c(combine_crc32c(value, value, second), value, third)
    right = combine_crc32c(value, combine_crc32c(value, value, third), second + third)
    assert left == right


@given(st.binary(max_size=400), st.integers(1, 100), st.booleans())
def test_blocks_are_those_of_the_pieces(data: bytes, block_size: int, is_writable: bool) -> None:
    view = memoryview(bytearray(data) if is_writable else data)
    pieces = [data[at : at + block_size] for at in range(0, len(data), block_size)]
    assert crc32c_blocks(view, block_size) == [crc32c(piece) for piece in pieces]


@pytest.mark.parametrize("is_gil_busy", [False, True])
def test_large_memory_has_the_same_blocks(is_gil_busy: bool) -> None:
    data = random.Random(0).randbytes(3_000_001)
    view, block_size = memoryview(data), 65_536
    stop = threading.Event()
    thread = threading.Thread(target=_keep_gil_until, args=(stop,))
    if is_gil_busy:
        thread.start()
    try:
        crcs = crc32c_blocks(view, block_size)
    finally:
        stop.set()
        if is_gil_busy:
            thread.join()
    pieces = [view[at : at + block_size] for at in range(0, len(view), block_size)]
    assert crcs == [google_crc32c.value(bytes(piece)) for piece in pieces]
    assert crc32c(view) == google_crc32c.value(data)


def _keep_gil_until(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(100))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the C library may be hidden")
def test_large_memory_is_hashed_without_the_gil() -> None:
    assert _extend_without_gil is not _extend_by_window


def test_memory_is_hashed_by_google_crc32c_without_its_c_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Windows, where the C library is hidden."""

    class Hidden(ctypes.CDLL):
        def __init__(self, name: str) -> None:
            raise OSError(name)

    found = _load_extend(Hidden)
    assert found is _extend_by_window
    monkeypatch.setattr(checksums, "_extend", found)
    data = random.Random(1).randbytes(200_001)
    view = memoryview(bytearray(data))
    assert crc32c(view) == google_crc32c.value(data)


@given(st.binary(max_size=400), st.integers(1, 100))
def test_blocks_join_to_the_whole(data: bytes, block_size: int) -> None:
    crcs = crc32c_blocks(memoryview(data), block_size)
    assert join_crc32c(crcs, block_size, len(data)) == crc32c(data)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=9), st.integers(1, 2**40), st.data())
def test_joining_is_combining_one_by_one(
    crcs: list[int], block_size: int, data: st.DataObject
) -> None:
    last = data.draw(st.integers(1, block_size))
    sizes = [block_size] * len(crcs[1:]) + [last] * len(crcs[:1])
    expected = 0
    for crc, each in zip(crcs, sizes, strict=True):
        expected = combine_crc32c(expected, crc, each)
    assert join_crc32c(crcs, block_size, sum(sizes)) == expected
