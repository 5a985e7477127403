"""Crc32c and MD5: computed, combined, and compared with the checksums in a request."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import google_crc32c

from aioflux.testing.gcs_server._errors import APIError

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Buffer

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed (RFC 3720, appendix B.4)
_ONE = 1 << 31  # the polynomial 1, bits reversed
_WINDOW = 256 * 1024  # bytes that fit into a CPU cache


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredChecksums:
    """Checksums in a request, to compare with the received bytes. None means not in the request."""

    crc32c: int | None = None
    md5: bytes | None = None

    def check(self, *, crc32c: int, md5: bytes | None) -> None:
        """Raise APIError (400) if a checksum differs from the checksum of the received bytes."""
        if md5 is not None and self.md5 not in (None, md5):
            sent, actual = (base64.b64encode(value or b"").decode() for value in (self.md5, md5))
            raise _bad_digest("MD5", sent, actual)
        if self.crc32c not in (None, crc32c):
            raise _bad_digest("CRC32C", encode_crc32c(self.crc32c or 0), encode_crc32c(crc32c))


NO_CHECKSUMS = DeclaredChecksums()


def read_checksum_headers(headers: Mapping[str, str]) -> DeclaredChecksums:
    """Read `x-goog-hash` and `Content-MD5`. Raise APIError (400) if one is malformed."""
    text = headers.get("x-goog-hash")
    fields = [field.strip().partition("=") for field in text.split(",")] if text else []
    values = {name.lower(): value for name, _, value in fields}
    if "content-md5" in headers:
        values.setdefault("md5", headers["content-md5"].strip())
    return decode_checksums(crc32c=values.get("crc32c"), md5=values.get("md5"))


def decode_checksums(*, crc32c: str | None, md5: str | None) -> DeclaredChecksums:
    """Decode checksums in base64. Raise APIError (400) if one is malformed."""
    if crc32c is None and md5 is None:
        return NO_CHECKSUMS
    return DeclaredChecksums(
        crc32c=None if crc32c is None else int.from_bytes(_decode(crc32c, 4), "big"),
        md5=None if md5 is None else _decode(md5, 16),
    )


def merge_declared(first: DeclaredChecksums, second: DeclaredChecksums) -> DeclaredChecksums:
    """Merge checksums from two places of a request. Raise APIError (400) if they differ."""
    for left, right in ((first.crc32c, second.crc32c), (first.md5, second.md5)):
        if None not in (left, right) and left != right:
            raise APIError(400, "invalid", "The declared checksums differ.", code="BadDigest")
    return DeclaredChecksums(
        crc32c=second.crc32c if first.crc32c is None else first.crc32c,
        md5=second.md5 if first.md5 is None else first.md5,
    )


class Digest:
    """Crc32c and MD5 of bytes in several pieces. The MD5 takes ten times as long as the crc32c."""

    def __init__(self, *, with_md5: bool = True) -> None:
        self.crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None

    @property
    def md5(self) -> bytes | None:
        return None if self._md5 is None else self._md5.digest()

    def update(self, piece: Buffer) -> None:
        for window in _windows(piece):
            self.crc32c = google_crc32c.extend(self.crc32c, window)
            if self._md5 is not None:
                self._md5.update(window)


def hash_pieces(pieces: Iterable[Buffer], *, with_md5: bool = True) -> tuple[int, bytes | None]:
    """Return the crc32c and, with `with_md5`, the MD5 of the concatenation of pieces."""
    digest = Digest(with_md5=with_md5)
    for piece in pieces:
        digest.update(piece)
    return digest.crc32c, digest.md5


def _windows(piece: Buffer) -> Iterable[bytes]:
    """Copy a piece into `bytes`, the only type that google-crc32c accepts."""
    if isinstance(piece, bytes):
        return (piece,)
    view = memoryview(piece)
    return (bytes(view[start : start + _WINDOW]) for start in range(0, len(view), _WINDOW))


def encode_crc32c(crc32c: int) -> str:
    """Encode a crc32c as in the APIs of GCS: big-endian, in base64."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def combine_crc32c(parts: Iterable[tuple[int, int]]) -> int:
    """Return the crc32c of a concatenation, from the crc32c and size of each part.

    The algorithm is that of `crc32_combine` in zlib: n appended bytes multiply the checksum by
    x^(8n), modulo the polynomial.
    """
    combined = 0
    for crc32c, size in parts:
        combined = _multiply(_power(size), combined) ^ crc32c
    return combined


@lru_cache(maxsize=256)
def _power(num_bytes: int) -> int:
    """Return x^(8 * num_bytes) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials with reversed bits, modulo the Castagnoli polynomial."""
    product = 0
    for shift in range(31, -1, -1):
        if a >> shift & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _decode(text: str, size: int) -> bytes:
    try:
        value = base64.b64decode(text, validate=True)
    except binascii.Error:
        value = b""
    if len(value) != size:
        raise APIError(400, "invalid", f"Invalid checksum: {text}", code="InvalidDigest")
    return value


def _bad_digest(kind: str, sent: str, actual: str) -> APIError:
    message = f"Provided {kind} hash {sent!r} doesn't match calculated {kind} hash {actual!r}."
    return APIError(400, "invalid", message, code="BadDigest")
