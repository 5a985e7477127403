"""Whether an answer to a read of S3 is what was asked for, and what vouches for its bytes. Pure.

As for Cloud Storage, an answer that could be other bytes than those asked for is refused. S3 tells
a checksum where the whole object was asked for: its crc32c, or another one, or that its entity tag
is the MD5 of an object of one part.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from typing import TYPE_CHECKING, Any

from aioflux._services import headers as _headers
from aioflux._services.s3.wire import etag_of, full_crc32c, generation_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioflux._services.s3.wire import Pin

__all__ = [
    "byte_range",
    "generation_of_head",
    "has_md5",
    "is_same_content",
    "object_size",
    "size_past_the_end",
    "told_crc32c",
]

_ACTUAL_SIZE = re.compile(rb"<ActualObjectSize>([0-9]{1,18})</ActualObjectSize>")
_MD5 = re.compile(r"[0-9a-f]{32}")


def byte_range(start: int, end: int | None, pin: Pin) -> bytes:
    """Write the value of a Range header for `[start, end)`; empty where it is the whole object."""
    if start == 0 and (end is None or (pin.size is not None and end >= pin.size)):
        return b""
    return _headers.byte_range(start, end)


def object_size(
    status: int,
    headers: Mapping[bytes, bytes],
    num_bytes: int,
    *,
    start: int,
    end: int | None,
    pin: Pin,
) -> int:
    """Return the size of the whole object that an answer to a read belongs to, in bytes.

    Takes what `size_from_response` takes, and the content that was asked for.

    Raises:
        ValueError: The answer is another than the one that was asked for; says how.
    """
    etag = etag_of(headers)
    if not etag:
        # Such as the page that a hotel's network sends for every url.
        raise ValueError("the answer tells no entity tag: S3 did not send it")
    if pin.etag and etag != pin.etag:
        raise ValueError(f"the answer is of another content, with the entity tag {etag!r}")
    size = _headers.size_from_response(status, headers, num_bytes, start=start, end=end)
    if pin.size is not None and size != pin.size:
        raise ValueError(f"{size} bytes are there now, not {pin.size}")
    return size


def generation_of_head(headers: Mapping[bytes, bytes]) -> str:
    """Return the generation that the head of an answer to a read tells; empty where it does not."""
    part = _headers.parse_content_range(headers)
    if part is not None:
        return generation_of(etag_of(headers), part[2])
    told = headers.get(b"content-length", b"")
    return generation_of(etag_of(headers), int(told)) if told.isdigit() else ""


def size_past_the_end(headers: Mapping[bytes, bytes], body: Any, *, start: int) -> int | None:
    """Return the size of the object that an answer 416 tells, or None where it cannot be believed.

    Args:
        headers: Headers of the answer, names in lower case.
        body: Its body, in which S3 tells it.
        start: First byte that was asked for: an object that is longer has it.
    """
    if b"content-range" in headers:
        return _headers.size_from_unsatisfied(headers, start=start)
    match = _ACTUAL_SIZE.search(bytes(body))
    return int(match[1]) if match is not None and int(match[1]) <= start else None


def told_crc32c(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the crc32c of the whole object that an answer for all of it tells, or None.

    Raises:
        ValueError: It is damaged.
    """
    return full_crc32c(headers.get(b"x-amz-checksum-crc32c"), headers.get(b"x-amz-checksum-type"))


def is_same_content(headers: Mapping[bytes, bytes], data: Any, *, takes_md5: bool) -> bool | None:
    """Compare the bytes of a whole object with what an answer without crc32c tells of them.

    Args:
        headers: Headers of the answer, names in lower case.
        data: The bytes.
        takes_md5: Compare with the MD5, too, which takes 1.6 ms for a MiB.

    Returns:
        None where it tells nothing that can be compared.
    """
    get = headers.get
    if get(b"x-amz-checksum-type") != b"COMPOSITE":
        for name, digest in _DIGESTS.items():
            told = get(name)
            if told is None or b"-" in told:
                continue
            actual = digest(data)
            if actual is not None:
                return base64.b64encode(actual) == told
    if not takes_md5 or not has_md5(headers):
        return None
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == etag_of(headers)


def has_md5(headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether the entity tag is the MD5 of the bytes: of one part, with no key of KMS or own.

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
    """Compute a CRC64NVME, where awscrt is there to do it."""
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
