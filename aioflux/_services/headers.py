"""HTTP header values that several services share: ranges, dates, checksums. No I/O.

Source: RFC 9110, 5.6.7 and 14.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux._values.meta import ObjectMeta

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import ReadRequest, WriteRequest

DEFAULT_TYPE = "application/octet-stream"
"""Content type of objects that are written without a content type."""
_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)
_UNSATISFIED = re.compile(rb"bytes \*/([0-9]{1,18})", re.IGNORECASE)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def byte_range(start: int, end: int | None) -> bytes:
    """Return the value of a Range header for `[start, end)`; None means the end of the object."""
    return b"bytes=%d-" % start if end is None else b"bytes=%d-%d" % (start, end - 1)


def parse_content_range(headers: Mapping[bytes, bytes]) -> tuple[int, int, int] | None:
    """Return first byte, last byte and object size from Content-Range.

    None if the header is missing, or is not one range with a known size.
    """
    match = _CONTENT_RANGE.fullmatch(headers.get(b"content-range") or b"")
    return (int(match[1]), int(match[2]), int(match[3])) if match is not None else None


def size_from_response(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a 2xx response to a read.

    Raises:
        ValueError: The response does not have the requested bytes.
    """
    num_bytes, start, end = response.num_bytes, request.start, request.end
    if response.status == 200:
        if start or (end is not None and num_bytes > end):
            raise ValueError("the service ignored the range")
        return num_bytes
    if response.status != 206:
        raise ValueError(f"HTTP {response.status} is not a response to a read")
    content_range = response.headers.get(b"content-range")
    if (
        not start
        and end is not None
        and 0 < num_bytes <= end
        and content_range == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
    ):
        # Fast path for the most frequent response, a whole object; the checks below accept it, too.
        return num_bytes
    part = parse_content_range(response.headers)
    if part is None:
        # The response is, for example, multipart/byteranges, which has the ranges in the body.
        raise ValueError(f"the Content-Range {content_range!r} is not one range with a known size")
    first, last, size = part
    if not start == first <= last < size or last - first + 1 != num_bytes:
        raise ValueError(
            f"the response is not the range from byte {start} on: it has {num_bytes} bytes, and "
            f"its Content-Range is {content_range!r}"
        )
    if end is not None and last >= end:
        raise ValueError(
            f"the response is longer than the requested {end - start} bytes: its Content-Range is "
            f"{content_range!r}"
        )
    return size


def size_from_unsatisfied(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the object size from a 416 response; None if it has none, or one above `start`."""
    match = _UNSATISFIED.fullmatch(headers.get(b"content-range") or b"")
    if match is None or int(match[1]) > start:
        return None
    return int(match[1])


def parse_http_date(text: str) -> datetime | None:
    """Parse an HTTP date in the preferred format (IMF-fixdate); None for other formats.

    Faster than `email.utils.parsedate_to_datetime`, which parses all date formats of email.
    """
    try:
        month = _MONTHS.index(text[8:11]) + 1
        day, year, clock = int(text[5:7]), int(text[12:16]), text[17:25]
        hour, minute, second = int(clock[:2]), int(clock[3:5]), int(clock[6:8])
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None


def meta_from_headers(
    headers: Mapping[bytes, bytes],
    *,
    key: str,
    uri: str,
    size: int,
    generation: str,
    user_prefix: bytes,
    class_header: bytes,
    crc32c: int | None = None,
    content_encoding: str = "",
    written: WriteRequest | None = None,
) -> ObjectMeta:
    """Build the metadata of an object from the headers of a response.

    The names of `headers` and of user metadata are in lower case. Headers with `user_prefix` are
    user metadata; their values are decoded as UTF-8, or as Latin-1 if they are not UTF-8. The
    storage class is in `class_header`. After a write, content type and metadata are those of its
    request, `written`, since the headers describe the body of the response.
    """
    get = headers.get
    changed = get(b"last-modified", b"").decode("latin-1")
    if written is None:
        content_type = get(b"content-type", b"").decode("latin-1")
        num_cut = len(user_prefix)
        metadata = {
            name[num_cut:].decode("ascii"): _as_text(value)
            for name, value in headers.items()
            if name.startswith(user_prefix)
        }
    else:
        content_type = written.content_type or DEFAULT_TYPE
        metadata = dict(written.metadata or {})
    return ObjectMeta(
        key=key,
        uri=uri,
        size=size,
        etag=get(b"etag", b"").decode("latin-1").strip('"'),
        generation=generation,
        crc32c=crc32c,
        updated=parse_http_date(changed) if changed else None,
        content_type=content_type,
        content_encoding=content_encoding,
        storage_class=get(class_header, b"").decode("latin-1"),
        metadata=metadata,
    )


def _as_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def encode_crc32c(value: int) -> str:
    """Encode a crc32c as base64 of 4 big-endian bytes."""
    return binascii.b2a_base64(value.to_bytes(4, "big"), newline=False).decode()


def decode_crc32c(text: str | bytes) -> int | None:
    """Decode a base64 crc32c; None for an empty text.

    Raises:
        ValueError: The text is not base64 of 4 bytes.
    """
    if not text:
        return None
    value = binascii.a2b_base64(text, strict_mode=True)
    if len(value) != 4:
        raise ValueError(f"a crc32c has 4 bytes, not {len(value)}")
    return int.from_bytes(value, "big")
