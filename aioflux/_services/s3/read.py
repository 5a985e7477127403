"""Checks of responses to reads of S3, and of their checksums. No I/O.

A response whose bytes may not be the requested bytes is rejected. S3 returns a checksum only for a
read of a whole object: a crc32c, another checksum, or, for an object written by one request, an
ETag that is the MD5.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from aioflux._services import headers as _headers
from aioflux._services.s3.wire import etag_of, generation_of, parse_pin

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import ReadRequest
    from aioflux._services.s3.wire import Pin

_ACTUAL_SIZE = re.compile(rb"<ActualObjectSize>([0-9]{1,18})</ActualObjectSize>")
_MD5 = re.compile(r"[0-9a-f]{32}")
_MAX_GUESSED_BYTES: Final = 4 * 1024 * 1024
"""Longest range that `WholeObjectGuesses` omits."""
_NUM_AFTER_WRONG_GUESS: Final = 1000
"""Number of reads after a wrong guess of which only the last omits its Range again."""


def byte_range(start: int, end: int | None, pin: Pin) -> bytes:
    """Return the value of a Range header for `[start, end)`; empty for the whole object."""
    if start == 0 and (end is None or (pin.size is not None and end >= pin.size)):
        return b""
    return _headers.byte_range(start, end)


def object_size(request: ReadRequest, response: Response, etag: str) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: The response does not match the request.
    """
    if not etag:
        # The response is, for example, the login page of a public network.
        raise ValueError("the response has no ETag: it is not from S3")
    size = _headers.size_from_response(request, response)
    generation = request.generation
    if generation and generation != generation_of(etag, size):
        pin = parse_pin(generation)
        if pin.etag and etag != pin.etag:
            raise ValueError(f"the response has the ETag {etag!r}, not {pin.etag!r}")
        if pin.size is not None and size != pin.size:
            raise ValueError(f"the object has {size} bytes now, not {pin.size}")
    return size


def generation_from_head(headers: Mapping[bytes, bytes]) -> str:
    """Return the generation from the headers of a response to a read; empty if they have none."""
    part = _headers.parse_content_range(headers)
    if part is not None:
        return generation_of(etag_of(headers), part[2])
    length = headers.get(b"content-length", b"")
    return generation_of(etag_of(headers), int(length)) if length.isdigit() else ""


def size_past_the_end(headers: Mapping[bytes, bytes], body: Any, *, start: int) -> int | None:
    """Return the object size from a 416 response; None if it is missing, or larger than `start`."""
    if b"content-range" in headers:
        return _headers.size_from_unsatisfied(headers, start=start)
    match = _ACTUAL_SIZE.search(bytes(body))
    return int(match[1]) if match is not None and int(match[1]) <= start else None


def is_same_content(headers: Mapping[bytes, bytes], data: Any, *, uses_md5: bool) -> bool | None:
    """Compare the bytes of a whole object with a checksum of the response other than crc32c.

    Args:
        headers: Headers of the response, names in lower case.
        data: The bytes.
        uses_md5: If there is no other checksum, compare the MD5, which takes 1.6 ms per MiB.

    Returns:
        Whether they match; None if the response has no checksum that can be computed here.
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
    if not uses_md5 or not has_md5(headers):
        return None
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == etag_of(headers)


def has_md5(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the ETag is the MD5 of the bytes: one part, not encrypted by a KMS key.

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
    """Decisions on which reads omit their Range and request the whole object, of unknown size.

    S3 returns a checksum only for a whole object. Most reads of small objects by key have a range
    that includes the whole object, so they omit the Range. If the object is larger than the range,
    the connection must be closed. Of the next such reads, beginning with the repeated one, 999 send
    their Range.
    """

    def __init__(self) -> None:
        self._num_ranges_left = 0

    def omits_range(self, end: int | None) -> bool:
        """Return whether to send a read of `[0, end)` without a Range."""
        if end is None or end > _MAX_GUESSED_BYTES:
            return False
        if self._num_ranges_left:
            self._num_ranges_left -= 1
        return not self._num_ranges_left

    def note_wrong(self) -> None:
        """Record that an object was larger than the omitted Range."""
        self._num_ranges_left = _NUM_AFTER_WRONG_GUESS
