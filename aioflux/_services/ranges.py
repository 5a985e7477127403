"""Ranges of reads as HTTP writes them, and what an answer tells of its own range. Pure.

Source: RFC 9110, 14.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["byte_range", "parse_content_range", "size_past_the_end", "size_told"]

_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)
_UNSATISFIED = re.compile(rb"bytes \*/([0-9]{1,18})", re.IGNORECASE)


def byte_range(start: int, end: int | None) -> bytes:
    """Write the range that asks for `[start, end)`; None means the end of the object."""
    return b"bytes=%d-" % start if end is None else b"bytes=%d-%d" % (start, end - 1)


def parse_content_range(headers: Mapping[bytes, bytes]) -> tuple[int, int, int] | None:
    """Return first byte, last byte and size of the object, or None where no such range is told."""
    match = _CONTENT_RANGE.fullmatch(headers.get(b"content-range") or b"")
    return (int(match[1]), int(match[2]), int(match[3])) if match is not None else None


def size_told(
    status: int, headers: Mapping[bytes, bytes], num_bytes: int, *, start: int, end: int | None
) -> int:
    """Return the size of the whole object that an answer to a read of `[start, end)` tells.

    Args:
        status: Status of the answer, 2xx.
        headers: Its headers, names in lower case.
        num_bytes: Length of its body.
        start: First byte that was asked for.
        end: One past the last byte that was asked for, or None for the end of the object.

    Raises:
        ValueError: The answer is for other bytes than those that were asked for.
    """
    if status == 200:
        if start or (end is not None and num_bytes > end):
            raise ValueError("the service ignored the range")
        return num_bytes
    if status != 206:
        raise ValueError(f"HTTP {status} is no answer to a read")
    told = headers.get(b"content-range")
    part = parse_content_range(headers)
    if part is None:
        # Several parts in one body (multipart/byteranges) name theirs inside of it.
        raise ValueError(f"no part of known size is named by its Content-Range {told!r}")
    first, last, size = part
    if not start == first <= last < size or last - first + 1 != num_bytes:
        raise ValueError(f"another part came: {num_bytes} bytes, Content-Range {told!r}")
    if end is not None and last >= end:
        raise ValueError(f"more than was asked for came: Content-Range {told!r}")
    return size


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the size of the object that an answer 416 tells, or None where it cannot be believed.

    Args:
        headers: Headers of the answer, names in lower case.
        start: First byte that was asked for: an object that is longer has it.
    """
    match = _UNSATISFIED.fullmatch(headers.get(b"content-range") or b"")
    if match is None or int(match[1]) > start:
        return None
    return int(match[1])
