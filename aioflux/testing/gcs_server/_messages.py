"""Requests and responses as values, with the bodies that JSON and XML clients receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._errors import APIError, invalid

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._delivery import Delivery
    from aioflux.testing.gcs_server._routes import Match

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]
Headers = Sequence[tuple[str, str]]

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_STATUS_LINES[308] = b"HTTP/1.1 308 Resume Incomplete\r\n"
_STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_STATUS_LINES = {
    code: _STATUS_LINES.get(code, b"HTTP/1.1 %d Unknown\r\n" % code) for code in range(100, 1000)
}
_NO_BODY = frozenset({204, 304})


class Request:
    """A request with its whole body.

    Args:
        method: Upper-case method.
        target: Raw request target: path and query as sent, still percent-encoded.
        raw_headers: Names and values as received.
        pieces: The body, in the pieces in which it arrived.
        scheme: `http` or `https`.
    """

    match: Match  # set by the router before any hook or handler sees the request
    in_batch = False
    """Whether it is one of a batch, which travels as a whole."""

    def __init__(
        self,
        method: str,
        target: bytes,
        raw_headers: list[tuple[bytes, bytes]],
        pieces: list[Buffer] | None = None,
        *,
        scheme: str = "http",
    ) -> None:
        self.method = method
        self.target = target
        self.raw_headers = raw_headers
        self.pieces = [] if pieces is None else pieces
        self.scheme = scheme

    @property
    def size(self) -> int:
        """Length of the body in bytes."""
        return sum(map(len, self.pieces))

    @property
    def params(self) -> Mapping[str, str]:
        """Decoded parts of the path by the names of the route's pattern (`bucket`, `object`)."""
        return self.match.params

    @property
    def query(self) -> Mapping[str, str]:
        """Decoded query; the last value of a repeated name. Shared: do not change it."""
        return self.match.url.query

    def query_list(self, name: str) -> list[str]:
        """Return every value of a query parameter, in order."""
        return [value for key, value in self.match.url.pairs if key == name]

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers by lower-case name; repeated ones joined with a comma."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in self.raw_headers:
            name, value = raw_name.decode("latin-1").lower(), _decode(raw_value)
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return headers

    @cached_property
    def body(self) -> bytes:
        """The body in one piece; a copy if it is large, unlike `pieces`."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], bytes):
            return self.pieces[0]
        return b"".join(self.pieces)

    def json(self) -> dict[str, Any]:
        """Decode the body as a JSON object; see `decode_object`."""
        return decode_object(self.body)

    @property
    def base_url(self) -> str:
        """Scheme and host in the request: the root of links."""
        return f"{self.scheme}://{self.headers.get('host', 'localhost')}"


@dataclass(kw_only=True, slots=True)
class Response:
    """A response; the connection adds `Content-Length` and `Connection`."""

    status: int = 200
    headers: Headers = ()
    block: bytes = b""
    """Encoded header lines, each ending in CRLF: those prepared once per object."""
    body: Body = b""
    """Sent without a copy; left out (its length still announced) if the method is HEAD."""
    delivery: Delivery | None = None
    """Delays and cuts while sending; None sends at once and whole."""
    sent_bytes: int = 0
    """Bytes of the body handed to the kernel; counted by the connection."""
    _size: int = field(default=-1, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Length of the body in bytes; read only once the body is final."""
        if self._size < 0:
            body = self.body
            self._size = len(body) if isinstance(body, bytes) else sum(map(len, self.pieces()))
        return self._size

    def pieces(self) -> Sequence[Buffer]:
        """Return the body as a sequence of buffers."""
        body = self.body
        return (body,) if isinstance(body, bytes | bytearray | memoryview) else body

    def head(self, *, connection: bytes = b"") -> bytes:
        """Encode the status line and headers; `connection` is a header line or empty."""
        parts = [_STATUS_LINES[self.status], self.block]
        parts += [f"{name}: {value}\r\n".encode() for name, value in self.headers]
        if self.status not in _NO_BODY:
            parts.append(b"Content-Length: %d\r\n" % self.size)
        parts += (connection, b"\r\n")
        return b"".join(parts)


def _decode(value: bytes) -> str:
    """Decode a header as GCS does: as UTF-8, else as Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def decode_object(data: Buffer) -> dict[str, Any]:
    """Decode a JSON object; nothing but white space is an empty one, anything else a 400."""
    if not bytes(data).strip():
        return {}
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as exc:
        raise APIError(400, "parseError", "Parse Error") from exc
    if not isinstance(value, dict):
        raise invalid("Expected a JSON object")
    return value


def slice_pieces(pieces: Sequence[Buffer], start: int, end: int) -> list[Buffer]:
    """Return the bytes `[start, end)` of a sequence of buffers, without a copy."""
    selected: list[Buffer] = []
    offset = 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(end - offset, len(piece))
        if low < high:
            selected.append(piece if high - low == len(piece) else memoryview(piece)[low:high])
        offset += len(piece)
        if offset >= end:
            break
    return selected


def timestamp(microseconds: int) -> str:
    """Format a time as both APIs do: RFC 3339 with milliseconds."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{_second(seconds)}.{fraction // 1000:03}Z"


@lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()


def json_response(value: object, *, status: int = 200, headers: Headers = ()) -> Response:
    """Build a response with a JSON document."""
    content_type = ("Content-Type", "application/json; charset=UTF-8")
    return Response(
        status=status, headers=(content_type, *headers), body=msgspec.json.encode(value)
    )


def xml_response(document: str, *, status: int = 200, headers: Headers = ()) -> Response:
    """Build a response with an XML document, given without its declaration."""
    body = f"<?xml version='1.0' encoding='UTF-8'?>{document}".encode()
    content_type = ("Content-Type", "application/xml; charset=UTF-8")
    return Response(status=status, headers=(content_type, *headers), body=body)


def error_response(error: APIError, *, xml: bool) -> Response:
    """Build the response with an error, in the form of the called API."""
    if error.status in _NO_BODY:
        return Response(status=error.status, headers=error.headers)
    kind = "application/xml; charset=UTF-8" if xml else "application/json; charset=UTF-8"
    body = error.xml_body() if xml else error.json_body()
    return Response(
        status=error.status, headers=(("Content-Type", kind), *error.headers), body=body
    )
