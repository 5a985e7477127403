"""Blob Batch: many deletes in one request, each with its own precondition and response. No I/O.

The body of the request is multipart: each part is an HTTP request. Each part of the body of the
response is an HTTP response.
Source: learn.microsoft.com/rest/api/storageservices/blob-batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_DELETES = 256
"""Largest number of requests in one batch."""
_BOUNDARY = b"batch_aioflux"
_BOUNDARY_OF = re.compile(rb'boundary="?([^";]+)"?', re.IGNORECASE)
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")


class SubResponse(NamedTuple):
    """The response to one request of a batch."""

    status: int
    headers: Mapping[bytes, bytes]
    """Headers by name in lower case."""
    body: bytes


def batch_type() -> tuple[bytes, bytes]:
    """Return the Content-Type header for `batch_body`."""
    return b"Content-Type", b"multipart/mixed; boundary=" + _BOUNDARY


def batch_body(requests: Sequence[tuple[bytes, Sequence[tuple[bytes, bytes]]]]) -> bytes:
    """Return the body of a batch of deletes, given the target and headers of each."""
    parts: list[bytes] = []
    for number, (target, headers) in enumerate(requests):
        lines = [
            b"--" + _BOUNDARY,
            b"Content-Type: application/http",
            b"Content-Transfer-Encoding: binary",
            b"Content-ID: %d" % number,
            b"",
            b"DELETE %b HTTP/1.1" % target,
            *(b"%b: %b" % header for header in headers),
            b"Content-Length: 0",
            b"",
            b"",
        ]
        parts.append(b"\r\n".join(lines))
    return b"".join(parts) + b"--" + _BOUNDARY + b"--\r\n"


def parse_batch(
    content_type: bytes, data: bytes | bytearray | memoryview
) -> dict[int, SubResponse]:
    """Return the response to each request of a batch, by the index of the request.

    Raises:
        ValueError: The response is not multipart or is truncated, or a part is not a response.
    """
    boundary = _BOUNDARY_OF.search(content_type)
    if boundary is None:
        raise ValueError("the response is not multipart")
    responses: dict[int, SubResponse] = {}
    for part in bytes(data).split(b"--" + boundary[1])[1:]:
        if part.startswith(b"--"):
            return responses
        head, _, message = part.lstrip(b"\r\n").partition(b"\r\n\r\n")
        number = _headers(head.split(b"\r\n")).get(b"content-id", b"")
        inner, _, body = message.partition(b"\r\n\r\n")
        first, *lines = inner.split(b"\r\n")
        status = _STATUS.match(first)
        if status is None or not number.isdigit():
            raise ValueError("a part of the response is not an HTTP response")
        responses[int(number)] = SubResponse(int(status[1]), _headers(lines), body.rstrip(b"\r\n"))
    raise ValueError("the response is truncated")


def _headers(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs if name.strip()}
