"""HTTP requests and responses as values, without sockets."""

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
    """HTTP request with its complete body.

    Args:
        method: Upper-case method.
        target: Raw request target: path and query, still percent-encoded.
        raw_headers: Names and values as received.
        pieces: Pieces of the body, in order.
        scheme: `http` or `https`.
    """

    match: Match  # set by the application before the first hook
    in_batch = False
    """Whether the request is a part of a batch request."""

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
        """Decoded parameters of the path, for example `bucket` and `object`."""
        return self.match.params

    @property
    def query(self) -> Mapping[str, str]:
        """Decoded query parameters. If a name is repeated, the last value is used."""
        return self.match.url.query

    def query_list(self, name: str) -> list[str]:
        """Return every value of a query parameter, in order."""
        return [value for key, value in self.match.url.pairs if key == name]

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers by lower-case name. The values of a repeated header are joined with a comma."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in self.raw_headers:
            name, value = raw_name.decode("latin-1").lower(), _decode(raw_value)
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return headers

    @cached_property
    def body(self) -> bytes:
        """Body in one piece. For a large body this is a copy, so prefer `pieces`."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], bytes):
            return self.pieces[0]
        return b"".join(self.pieces)

    def json(self) -> dict[str, Any]:
        """Decode the body as a JSON object; see `decode_object`."""
        return decode_object(self.body)

    @property
    def base_url(self) -> str:
        """Url of the server as the client sees it, to build links."""
        return f"{self.scheme}://{self.headers.get('host', 'localhost')}"


@dataclass(kw_only=True, slots=True)
class Response:
    """HTTP response. `head` adds `Content-Length` and `Connection` to the headers."""

    status: int = 200
    headers: Headers = ()
    block: bytes = b""
    """More header lines, already encoded, each ending in CRLF."""
    body: Body = b""
    """Body in one or several buffers, which are sent without a copy. Not sent for HEAD."""
    delivery: Delivery | None = None
    """Delays, bandwidth and disconnects while sending. None sends the response at once."""
    sent_bytes: int = 0
    """Bytes of the body passed to the kernel so far. The connection updates this."""
    _size: int = field(default=-1, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Length of the body in bytes, cached: do not change `body` after the first use."""
        if self._size < 0:
            body = self.body
            self._size = len(body) if isinstance(body, bytes) else sum(map(len, self.pieces()))
        return self._size

    def pieces(self) -> Sequence[Buffer]:
        body = self.body
        return (body,) if isinstance(body, bytes | bytearray | memoryview) else body

    def head(self, *, connection: bytes = b"") -> bytes:
        """Encode the status line and the headers.

        Args:
            connection: Encoded `Connection` header line; may be empty.
        """
        parts = [_STATUS_LINES[self.status], self.block]
        parts += [f"{name}: {value}\r\n".encode() for name, value in self.headers]
        if self.status not in _NO_BODY:
            parts.append(b"Content-Length: %d\r\n" % self.size)
        parts += (connection, b"\r\n")
        return b"".join(parts)


def _decode(value: bytes) -> str:
    """Decode a header as GCS does: as UTF-8 if it is valid, as Latin-1 otherwise."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def decode_object(data: Buffer) -> dict[str, Any]:
    """Decode a JSON object; empty text and null are {}. Raise APIError (400) for other JSON."""
    if bytes(data).strip() in {b"", b"null"}:  # rclone sends null
        return {}
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as exc:
        raise APIError(400, "parseError", "Parse Error") from exc
    if not isinstance(value, dict):
        raise invalid("Expected a JSON object")
    return value


def slice_pieces(pieces: Sequence[Buffer], start: int, end: int) -> list[Buffer]:
    """Return the bytes `[start, end)` of concatenated buffers, without a copy."""
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
    """Format a time for both APIs: RFC 3339 with milliseconds."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{_second(seconds)}.{fraction // 1000:03}Z"


@lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()


def json_response(value: object, *, status: int = 200, headers: Headers = ()) -> Response:
    content_type = ("Content-Type", "application/json; charset=UTF-8")
    return Response(
        status=status, headers=(content_type, *headers), body=msgspec.json.encode(value)
    )


def xml_response(document: str, *, status: int = 200, headers: Headers = ()) -> Response:
    """Build a response with an XML document. This function adds the XML declaration."""
    body = f"<?xml version='1.0' encoding='UTF-8'?>{document}".encode()
    content_type = ("Content-Type", "application/xml; charset=UTF-8")
    return Response(status=status, headers=(content_type, *headers), body=body)


def error_response(error: APIError, *, xml: bool) -> Response:
    """Build an error response for the XML API or the JSON API."""
    if error.status in _NO_BODY:
        return Response(status=error.status, headers=error.headers)
    kind = "application/xml; charset=UTF-8" if xml else "application/json; charset=UTF-8"
    body = error.xml_body() if xml else error.json_body()
    return Response(
        status=error.status, headers=(("Content-Type", kind), *error.headers), body=body
    )
