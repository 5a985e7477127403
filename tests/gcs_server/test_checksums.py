"""Checksums as plain functions."""

from __future__ import annotations

import base64
import hashlib

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing.gcs_server import APIError
from aioflux.testing.gcs_server._checksums import (
    NO_CHECKSUMS,
    DeclaredChecksums,
    combine_crc32c,
    hash_pieces,
    read_checksum_headers,
)

PIECES = st.lists(st.binary(max_size=3000))


@settings(max_examples=40)
@given(PIECES)
def test_the_whole_from_its_parts(pieces: list[bytes]) -> None:
    """Combining the parts' crc32c is the crc32c of the parts joined."""
    parts = [(google_crc32c.value(piece), len(piece)) for piece in pieces]
    assert combine_crc32c(parts) == google_crc32c.value(b"".join(pieces))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@settings(max_examples=30)
@given(PIECES)
def test_hashes_do_not_depend_on_where_pieces_end(kind, pieces: list[bytes]) -> None:
    """Pieces of any kind of memory hash as if they were joined."""
    data = b"".join(pieces)
    expected = google_crc32c.value(data), hashlib.md5(data).digest()
    assert hash_pieces([kind(piece) for piece in pieces]) == expected


def test_large_writable_memory_is_hashed_whole() -> None:
    """Memory of more than one window has the checksum of all of it."""
    data = bytes(range(256)) * 5000
    assert hash_pieces([bytearray(data)]) == hash_pieces([data])


def test_headers_declare_either_checksum_or_both() -> None:
    """x-goog-hash holds both kinds in one header; Content-MD5 holds MD5."""
    crc32c, md5 = bytes(range(4)), bytes(range(16))
    texts = [base64.b64encode(value).decode() for value in (crc32c, md5)]
    number = int.from_bytes(crc32c, "big")
    assert read_checksum_headers({}) is NO_CHECKSUMS
    assert read_checksum_headers(
        {"x-goog-hash": f"crc32c={texts[0]}, md5={texts[1]}"}
    ) == DeclaredChecksums(crc32c=number, md5=md5)
    assert read_checksum_headers({"content-md5": texts[1]}) == DeclaredChecksums(md5=md5)


@pytest.mark.parametrize("value", ["crc32c=!", "crc32c=AAAA", "md5=AAAAAA==", "crc32c="])
def test_a_value_that_is_no_checksum_is_rejected(value: str) -> None:
    """Wrong lengths and bad base64 are 400 InvalidDigest."""
    with pytest.raises(APIError) as caught:
        read_checksum_headers({"x-goog-hash": value})
    assert (caught.value.status, caught.value.code) == (400, "InvalidDigest")
