"""CRC32C and MD5: of bodies, combined from parts, and as requests declare them."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import google_crc32c

from aioflux.testing.gcs_server._errors import APIError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioflux.testing.gcs_server._messages import Buffer

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed (RFC 3720, appendix B.4)
_ONE = 1 << 31
_WINDOW = 256 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """Checksums that a writer declares; None is none."""

    crc32c: int | None = None
    md5: bytes | None = None

    def check(self, *, crc32c: int, md5: bytes | None) -> None:
        """Compare with the received bytes, an MD5 only if it was computed; else 400 `BadDigest`."""
        if md5 is not None and self.md5 not in (None, md5):
            sent, found = (base64.b64encode(value or b"").decode() for value in (self.md5, md5))
            raise _bad_digest("MD5", sent, found)
        if self.crc32c not in (None, crc32c):
            raise _bad_digest("CRC32C", encode_crc32c(self.crc32c or 0), encode_crc32c(crc32c))


NOTHING_DECLARED = Declared()


def declared_in(headers: Mapping[str, str]) -> Declared:
    """Read `x-goog-hash` and `Content-MD5`; a malformed value is a 400."""
    text = headers.get("x-goog-hash")
    fields = [field.strip().partition("=") for field in text.split(",")] if text else []
    values = {name.lower(): value for name, _, value in fields}
    if "content-md5" in headers:
        values.setdefault("md5", headers["content-md5"].strip())
    return declare(crc32c=values.get("crc32c"), md5=values.get("md5"))


def declare(*, crc32c: str | None, md5: str | None) -> Declared:
    """Read checksums in base64; a malformed one is a 400."""
    if crc32c is None and md5 is None:
        return NOTHING_DECLARED
    return Declared(
        crc32c=None if crc32c is None else int.from_bytes(_decode(crc32c, 4), "big"),
        md5=None if md5 is None else _decode(md5, 16),
    )


def merge_declared(first: Declared, second: Declared) -> Declared:
    """Merge the checksums declared in two places; a 400 if they differ."""
    for one, other in ((first.crc32c, second.crc32c), (first.md5, second.md5)):
        if None not in (one, other) and one != other:
            raise APIError(400, "invalid", "The declared checksums differ.", code="BadDigest")
    return Declared(
        crc32c=second.crc32c if first.crc32c is None else first.crc32c,
        md5=second.md5 if first.md5 is None else first.md5,
    )


class Digest:
    """crc32c and MD5 of bytes in pieces; the MD5 takes ten times as long as the crc32c."""

    def __init__(self, *, with_md5: bool = True) -> None:
        self.crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None

    @property
    def md5(self) -> bytes | None:
        """MD5 of the pieces so far."""
        return None if self._md5 is None else self._md5.digest()

    def update(self, piece: Buffer) -> None:
        """Add a piece."""
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
    """Copy memory that google-crc32c rejects (all but `bytes`) in pieces that fit a cache."""
    if isinstance(piece, bytes):
        return (piece,)
    view = memoryview(piece)
    return (bytes(view[at : at + _WINDOW]) for at in range(0, len(view), _WINDOW))


def encode_crc32c(crc32c: int) -> str:
    """Encode a crc32c as GCS does: big-endian, base64."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def combine_crc32c(parts: Iterable[tuple[int, int]]) -> int:
    """Return the crc32c of a concatenation from the crc32c and size in bytes of each part.

    Appending n bytes multiplies a checksum by x^(8n) in the field of the polynomial, as in the
    `crc32_combine` of zlib.
    """
    whole = 0
    for crc32c, size in parts:
        whole = _multiply(_power(size), whole) ^ crc32c
    return whole


@lru_cache(maxsize=256)
def _power(num_bytes: int) -> int:
    """Return x^(8 * num_bytes), by squaring."""
    result, square = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the Castagnoli polynomial, bits reversed."""
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


def _bad_digest(kind: str, sent: str, found: str) -> APIError:
    message = f"Provided {kind} hash {sent!r} doesn't match calculated {kind} hash {found!r}."
    return APIError(400, "invalid", message, code="BadDigest")
