"""Checks of responses to reads of S3, and of their checksums. No I/O.

As for Cloud Storage, a response that could hold other bytes than the requested ones is rejected.
S3 returns a checksum only for a read of a whole object: its crc32c, or another one, or an entity
tag that is the MD5 of an object of one part.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from typing import TYPE_CHECKING, Any, Final

from aioflux._services import headers as _headers
from aioflux._services.s3.wire import etag_of, generation_of, parse_pin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioflux._http import Response
    from aioflux._services.base import ReadRequest
    from aioflux._services.s3.wire import Pin

__all__ = [
    "WholeObjectGuesses",
    "byte_range",
    "generation_from_head",
    "has_md5",
    "is_same_content",
    "object_size",
    "size_past_the_end",
]

_ACTUAL_SIZE = re.compile(rb"<ActualObjectSize>([0-9]{1,18})</ActualObjectSize>")
_MD5 = re.compile(r"[0-9a-f]{32}")
_MAX_GUESSED_BYTES: Final = 4 * 1024 * 1024
_NOT_GUESSED: Final = 1000
"""Reads by name with a Range after a guess that was wrong."""


def byte_range(start: int, end: int | None, pin: Pin) -> bytes:
    """Return the Range header for `[start, end)`; empty for the whole object."""
    if start == 0 and (end is None or (pin.size is not None and end >= pin.size)):
        return b""
    return _headers.byte_range(start, end)


def object_size(request: ReadRequest, response: Response, etag: str) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: It is not the response to this read.
    """
    if not etag:
        # Such as the login page of a hotel's network.
        raise ValueError("the response has no entity tag: it is not from S3")
    size = _headers.size_from_response(request, response)
    generation = request.generation
    if generation and generation != generation_of(etag, size):
        pin = parse_pin(generation)
        if pin.etag and etag != pin.etag:
            raise ValueError(f"the response is of another content, with the entity tag {etag!r}")
        if pin.size is not None and size != pin.size:
            raise ValueError(f"the object has {size} bytes now, not {pin.size}")
    return size


def generation_from_head(headers: Mapping[bytes, bytes]) -> str:
    """Return the generation in the head of a response to a read; empty if it has none."""
    part = _headers.parse_content_range(headers)
    if part is not None:
        return generation_of(etag_of(headers), part[2])
    length = headers.get(b"content-length", b"")
    return generation_of(etag_of(headers), int(length)) if length.isdigit() else ""


def size_past_the_end(headers: Mapping[bytes, bytes], body: Any, *, start: int) -> int | None:
    """Return the size of the object from a response 416; None if it is missing or not plausible."""
    if b"content-range" in headers:
        return _headers.size_from_unsatisfied(headers, start=start)
    match = _ACTUAL_SIZE.search(bytes(body))
    return int(match[1]) if match is not None and int(match[1]) <= start else None


def is_same_content(headers: Mapping[bytes, bytes], data: Any, *, takes_md5: bool) -> bool | None:
    """Compare the bytes of a whole object with another checksum than a crc32c.

    Args:
        headers: Headers of the response, names in lower case.
        data: The bytes.
        takes_md5: Compare with the MD5, too, which takes 1.6 ms for a MiB.

    Returns:
        None if the response has no checksum that can be computed here.
    """
    get = headers.get
    if get(b"x-amz-checksum-type") != b"COMPOSITE":
        for name, digest in _DIGESTS.items():
            expected = get(name)
            if expected is None or b"-" in expected:
                continue
            actual = digest(data)
            if actual is not None:
                return base64.b64encode(actual) == expected
    if not takes_md5 or not has_md5(headers):
        return None
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == etag_of(headers)


def has_md5(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the entity tag is the MD5 of the bytes: of one part, not encrypted by KMS.

    Source: docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html.
    """
    get = headers.get
    if get(b"x-amz-server-side-encryption", b"AES256") != b"AES256":
        return False
    if b"x-amz-server-side-encryption-customer-algorithm" in headers:
        return False
    return _MD5.fullmatch(etag_of(headers)) is not None


def _crc32(data: Any) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _crc64nvme(data: Any) -> bytes | None:
    """Return the CRC64NVME; None if awscrt is not installed."""
    try:
        from awscrt.checksums import crc64nvme  # type: ignore[import-not-found]
    except ImportError:
        return None
    value: int = crc64nvme(data)
    return value.to_bytes(8, "big")


_DIGESTS: dict[bytes, Callable[[Any], bytes | None]] = {
    b"x-amz-checksum-crc64nvme": _crc64nvme,
    b"x-amz-checksum-crc32": _crc32,
    b"x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    b"x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
}


class WholeObjectGuesses:
    """Reads by name that are sent without a Range, because the object probably fits into it.

    Only a response for all of an object has a checksum, and most reads of small objects by name
    have a range beyond its end. If the object turns out to be larger, the connection is lost, and
    no read is guessed for a while.
    """

    def __init__(self) -> None:
        self._num_not_guessed = 0

    def reads_all(self, end: int | None) -> bool:
        """Return whether a read of `[0, end)` is sent without a Range."""
        if end is None or end > _MAX_GUESSED_BYTES:
            return False
        if self._num_not_guessed:
            self._num_not_guessed -= 1
        return not self._num_not_guessed

    def note_wrong(self) -> None:
        """Record that an object was larger."""
        self._num_not_guessed = _NOT_GUESSED
