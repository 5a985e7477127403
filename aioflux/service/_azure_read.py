"""Whether an answer to a read is what was asked for: rules over status and headers, no I/O."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aioflux.service._azure_wire import etag_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_whole", "object_size", "range_header", "size_past_the_end"]

_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)
_UNSATISFIED = re.compile(rb"bytes \*/([0-9]{1,18})", re.IGNORECASE)


def range_header(start: int, end: int | None) -> tuple[bytes, bytes]:
    """Write the header that asks for the bytes `[start, end)`; None means the end of the object."""
    asked = b"bytes=%d-" % start if end is None else b"bytes=%d-%d" % (start, end - 1)
    return b"x-ms-range", asked


def is_whole(
    status: int, headers: Mapping[bytes, bytes], num_bytes: int, *, end: int, generation: str
) -> bool:
    """Tell whether an answer to a read of `[0, end)` is a whole object, beyond any doubt.

    It is what most answers are, found with less work than `object_size` does, which takes all that
    are taken here. The arguments are as there.
    """
    told = headers.get(b"etag")
    return (
        status == 206
        and 0 < num_bytes <= end
        and headers.get(b"content-range") == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
        and told is not None
        and told not in {b"", b'""'}
        and (not generation or told == b'"%b"' % generation.encode())
    )


def object_size(
    status: int,
    headers: Mapping[bytes, bytes],
    num_bytes: int,
    *,
    start: int,
    end: int | None,
    generation: str,
) -> int:
    """Return the size of the whole object that an answer to a read belongs to, in bytes.

    Args:
        status: Status of the answer, 2xx.
        headers: Its headers, names in lower case.
        num_bytes: Length of its body.
        start: First byte that was asked for.
        end: One past the last byte that was asked for, or None for the end of the object.
        generation: Generation that was asked for; empty for any.

    Raises:
        ValueError: The answer is another than the one that was asked for; says how.
    """
    told = etag_of(headers)
    if not told or b"x-ms-request-id" not in headers:
        # Such as the page that a hotel's network sends for every url.
        raise ValueError("the answer tells no ETag or request id: Azure did not send it")
    if generation and told != generation:
        raise ValueError(f"the answer is of generation {told}")
    if status == 200:
        if start or (end is not None and num_bytes > end):
            raise ValueError("the service ignored the range")
        return num_bytes
    if status != 206:
        raise ValueError(f"HTTP {status} is no answer to a read")
    if not start and end is None:
        raise ValueError("a part came where the whole was asked for")
    return _part_size(headers, num_bytes, start, end)


def _part_size(headers: Mapping[bytes, bytes], num_bytes: int, start: int, end: int | None) -> int:
    told = headers.get(b"content-range")
    match = _CONTENT_RANGE.fullmatch(told or b"")
    if match is None:
        raise ValueError(f"no part of known size is named by its Content-Range {told!r}")
    first, last, size = map(int, match.groups())
    if not start == first <= last < size or last - first + 1 != num_bytes:
        raise ValueError(f"another part came: {num_bytes} bytes, Content-Range {told!r}")
    if end is not None and last >= end:
        raise ValueError(f"more than was asked for came: Content-Range {told!r}")
    return size


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the size of the object that an answer without bytes tells, or None if it tells none.

    Args:
        headers: Headers of the answer, names in lower case.
        start: First byte that was asked for: an object that is longer has it.
    """
    told = headers.get(b"content-range") or b""
    match = _UNSATISFIED.fullmatch(told)
    if match is not None:
        size = int(match[1])
    elif (part := _CONTENT_RANGE.fullmatch(told)) is not None and int(part[1]) == int(part[2]) + 1:
        # An emulator answers 206 with no bytes where the first one asked for is the end.
        size = int(part[3])
    else:
        return None
    return size if size <= start else None
