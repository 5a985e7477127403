"""Checks of responses to reads, by status and headers. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services import headers as _headers
from aioflux._services.azure.wire import etag_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_whole", "object_size", "range_header", "size_past_the_end"]


def range_header(start: int, end: int | None) -> tuple[bytes, bytes]:
    """Return the header for the bytes `[start, end)`; None means the end of the object."""
    return b"x-ms-range", _headers.byte_range(start, end)


def is_whole(
    status: int, headers: Mapping[bytes, bytes], num_bytes: int, *, end: int, generation: str
) -> bool:
    """Return whether a response to a read of `[0, end)` is certainly a whole object.

    Most responses are, and this takes less time than `object_size`, which accepts all of them, too.
    Arguments as there.
    """
    etag = headers.get(b"etag")
    return (
        status == 206
        and 0 < num_bytes <= end
        and headers.get(b"content-range") == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
        and etag is not None
        and etag not in {b"", b'""'}
        and (not generation or etag == b'"%b"' % generation.encode())
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
    """Return the size of the whole object, in bytes, from a response to a read.

    Arguments as `size_from_response`, and the generation of the read.

    Raises:
        ValueError: It is not the response to this read.
    """
    if (
        not start
        and end is not None
        and is_whole(status, headers, num_bytes, end=end, generation=generation)
    ):
        return num_bytes
    etag = etag_of(headers)
    if not etag or b"x-ms-request-id" not in headers:
        # Such as the login page of a hotel's network.
        raise ValueError("the response has no ETag or request id: it is not from Azure")
    if generation and etag != generation:
        raise ValueError(f"the response is of generation {etag}")
    if status == 206 and not start and end is None:
        raise ValueError("a range came in place of the whole object")
    return _headers.size_from_response(status, headers, num_bytes, start=start, end=end)


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the size of the object from a response without bytes; None if it is not plausible.

    Args:
        headers: Headers of the response, names in lower case.
        start: First byte of the read: a longer object would have it.
    """
    part = _headers.parse_content_range(headers)
    if part is None:
        return _headers.size_from_unsatisfied(headers, start=start)
    first, last, size = part
    # An emulator returns 206 without bytes for a range that starts at the end.
    return size if first == last + 1 and size <= start else None
