"""Checks of responses to reads of Azure, by status and headers. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services import headers as _headers
from aioflux._services.azure.wire import etag_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux._http import Response
    from aioflux._services.base import ReadRequest

__all__ = ["object_size", "range_header", "size_past_the_end"]


def range_header(start: int, end: int | None) -> tuple[bytes, bytes]:
    """Return the header for the range `[start, end)`; `end=None`: to the end of the object."""
    return b"x-ms-range", _headers.byte_range(start, end)


def object_size(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: The response does not match the request.
    """
    generation = request.generation
    etag = etag_of(response.headers)
    if not etag or b"x-ms-request-id" not in response.headers:
        # The response is, for example, the login page of a public network.
        raise ValueError("the response has no ETag or request id: it is not from Azure")
    if generation and etag != generation:
        raise ValueError(f"the response is of generation {etag}")
    if response.status == 206 and not request.start and request.end is None:
        raise ValueError("the service returned a range in place of the whole object")
    return _headers.size_from_response(request, response)


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the object size from a response without bytes; None if missing or above `start`."""
    part = _headers.parse_content_range(headers)
    if part is None:
        return _headers.size_from_unsatisfied(headers, start=start)
    first, last, size = part
    # An emulator returns 206 without bytes for a range that starts at the end.
    return size if first == last + 1 and size <= start else None
