"""Parser of MIME multipart bodies (RFC 2046): uploads and batches.

Some clients end lines with CRLF (google-cloud-storage uploads, gcloud-aio-storage), others with LF
(gcsfs, google-cloud-storage batches). The first boundary line shows the line ending of a body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request

_BLANK_LINE = re.compile(rb"(?:\A|\r?\n)\r?\n")
_PADDING = b" \t"


@dataclass(frozen=True, slots=True)
class BodyPart:
    """One part of a multipart body."""

    headers: Mapping[str, str]
    """Headers by lower-case name."""
    data: memoryview


def split_body(request: Request) -> list[BodyPart]:
    """Split the body of a request into its parts. Raise APIError (400) if it is malformed."""
    boundary = _boundary(request.headers.get("content-type", ""))
    pieces = request.pieces
    body = pieces[0] if len(pieces) == 1 else request.body
    if not isinstance(body, bytes | bytearray):
        body = bytes(body)
    return [_split_part(part) for part in _split(body, b"--" + boundary.encode())]


def _split_part(part: memoryview) -> BodyPart:
    """Split a part at the first blank line into headers and data."""
    window = bytes(part[: 64 << 10])
    blank = _BLANK_LINE.search(window)
    if blank is None:
        return BodyPart(_parse_headers(window), part[len(part) :])
    return BodyPart(_parse_headers(window[: blank.start()]), part[blank.end() :])


def _parse_headers(head: bytes) -> dict[str, str]:
    """Parse header lines. If a name is repeated, the last value is used."""
    lines = (line.partition(":") for line in head.decode("utf-8", "replace").splitlines())
    return {name.strip().lower(): value.strip() for name, colon, value in lines if colon}


def _boundary(content_type: str) -> str:
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_maintype() != "multipart" or not boundary:
        raise _malformed("its Content-Type names no boundary")
    return boundary


def _split(body: bytes | bytearray, delimiter: bytes) -> Iterator[memoryview]:
    """Yield the parts between the boundary lines."""
    view = memoryview(body)
    line_end, start = b"", -1
    for begin, end, is_last in _boundary_lines(body, delimiter):
        if start >= 0:
            stop = begin - len(line_end)
            yield view[start : max(start, stop)]
        if is_last:
            return
        if not line_end:
            line_end = b"\r\n" if body[end - 2 : end] == b"\r\n" else b"\n"
        start = end
    raise _malformed("its closing boundary is missing")


def _boundary_lines(body: bytes | bytearray, delimiter: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of each boundary line, and whether the line is the last boundary."""
    begin = body.find(delimiter)
    while begin >= 0:
        end = begin + len(delimiter)
        if begin == 0 or body[begin - 1 : begin] == b"\n":
            if body[end : end + 2] == b"--":
                yield begin, end + 2, True
            newline = body.find(b"\n", end)
            if newline >= 0 and not body[end:newline].strip(_PADDING + b"\r"):
                yield begin, newline + 1, False
        begin = body.find(delimiter, end)


def _malformed(reason: str) -> APIError:
    return APIError(400, "badContent", f"Malformed multipart body: {reason}.")
