"""Memory of bodies: rules for what is sent, and for destinations."""

from __future__ import annotations

import random

import google_crc32c
import pytest

from aioflux._http.body import (
    MAX_METADATA_BYTES,
    HashedMemory,
    StreamedBody,
    as_destination,
    as_views,
    check_length,
    memory_for,
)
from aioflux._http.codec import Headers, parse_head
from aioflux._http.errors import ProtocolError


def test_a_body_is_sent_in_flat_pieces_without_the_empty_ones() -> None:
    table = memoryview(bytearray(range(6))).cast("B", (2, 3))
    views = as_views([b"", b"ab", table, bytearray()])
    assert [bytes(view) for view in views] == [b"ab", bytes(range(6))]
    assert as_views(None) == []
    assert as_views(memoryview(b"")) == []


def test_memory_with_gaps_cannot_be_sent_or_received_into() -> None:
    gaps = memoryview(bytearray(6))[::2]
    with pytest.raises(ValueError, match="contiguous"):
        as_views(gaps)
    with pytest.raises(ValueError, match="contiguous"):
        as_destination(gaps)


def test_only_buffers_can_be_sent() -> None:
    with pytest.raises(TypeError):
        as_views(["text"])


def test_a_destination_of_any_shape_is_bytes() -> None:
    memory = bytearray(8)
    as_destination(memoryview(memory).cast("d"))[:2] = b"ab"
    assert memory[:2] == b"ab"


def test_a_function_that_returns_too_little_memory_is_an_error() -> None:
    assert len(memory_for(lambda size: memoryview(bytearray(size + 1)), 4)) == 4
    with pytest.raises(ValueError, match="returned 3 bytes of memory for a body of 4"):
        memory_for(lambda _: memoryview(bytearray(3)), 4)


@pytest.mark.parametrize("num_bytes", [0, 4, 5])
def test_a_length_is_compared_with_both_limits(num_bytes: int) -> None:
    check_length(num_bytes, None, None)
    for into, most in ((memoryview(bytearray(4)), None), (None, 4)):
        if num_bytes <= 4:
            check_length(num_bytes, into, most)
        else:
            with pytest.raises(ProtocolError, match=r"\b4\b"):
                check_length(num_bytes, into, most)


def test_payload_before_a_fault_counts_if_it_is_in_the_callers_memory() -> None:
    memory = memoryview(bytearray(8))
    for into, num_in_destination in ((memory, 3), (None, 0)):
        body = StreamedBody(status=200, chunked=True, into=into, max_body_bytes=None)
        data = b"3\r\nabc\r\nzz\r\n"
        with pytest.raises(ProtocolError):
            body.feed(data, 0, len(data))
        assert (body.num_bytes, body.num_in_destination) == (3, num_in_destination)
    assert memory[:3] == b"abc"


def test_a_head_needs_its_end() -> None:
    with pytest.raises(ProtocolError, match="empty line"):
        parse_head(b"HTTP/1.1 200 OK\r\n")[0]


def test_headers_are_counted() -> None:
    assert len(Headers({b"a": b"1", b"b": b"2"})) == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"3;a=\x01\r\nabc\r\n", "control character"),
        (b"3\nabc\r\n", "bare CR or LF"),
        (b"3\r;a\r\nabc\r\n", "bare CR or LF"),
        (b"3;" + b"e" * 4096 + b"\r\n", "over 4096 bytes"),
    ],
    ids=["control", "LF", "CR", "long"],
)
def test_lines_of_chunked_framing_are_strict(data: bytes, says: str) -> None:
    body = StreamedBody(status=200, chunked=True, into=None, max_body_bytes=None)
    with pytest.raises(ProtocolError, match=says):
        body.feed(data, 0, len(data))


@pytest.mark.parametrize("size", [0, 1, 300_000, 2**20 + 1], ids=str)
def test_the_checksum_of_received_pieces_is_that_of_the_body(size: int) -> None:
    data = random.Random(1).randbytes(size)
    memory = memoryview(bytearray(size))
    hashed = HashedMemory(memory)
    for content in (bytes(size), data):  # a second response begins again
        hashed.start(memory)
        for end in [*range(0, size, 70_000), size]:
            memory[:end] = content[:end]
            hashed.update(end)
    assert hashed.crc32c(memory) == google_crc32c.value(data)


def test_a_receiver_that_only_calls_for_memory_leaves_the_checksum_to_the_end() -> None:
    data = random.Random(2).randbytes(600_000)
    hashed = HashedMemory(lambda size: memoryview(bytearray(size)))
    hashed.start(memoryview(bytearray(600_000)))
    hashed.update(600_000)
    memory = hashed(len(data))
    memory[:] = data
    assert hashed.crc32c(memory) == google_crc32c.value(data)


@pytest.mark.parametrize("size", [0, 1, MAX_METADATA_BYTES, MAX_METADATA_BYTES + 1], ids=str)
def test_the_body_of_an_error_is_cut_at_the_limit_of_metadata(size: int) -> None:
    body = StreamedBody(status=404, chunked=False, into=bytes, max_body_bytes=None)
    data = b"x" * size
    body.feed(data, 0, size)
    assert body.is_truncated == (size > MAX_METADATA_BYTES)
    assert body.num_bytes == min(size, MAX_METADATA_BYTES)
