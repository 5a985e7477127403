"""HTTP/1.1 heads and the chunked coding, as pure functions over bytes.

The parser is stricter than RFC 9112 requires of a client: if a proxy could frame a response in
another way, none of its bytes can be trusted. It rejects whitespace before a colon, folded lines,
bare CR or LF, Content-Length beside Transfer-Encoding, transfer codings other than `chunked`,
framing headers in trailers, and everything else that h11 rejects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from aioflux._http.errors import ProtocolError

MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_CHUNK_LINE_BYTES: Final = 4096
_MAX_TRAILER_BYTES: Final = 16 * 1024
_MAX_CACHED_NAMES: Final = 512
_MAX_CACHED_TEMPLATES: Final = 64
_MIN_SEEN: Final = 8
"""Number of heads with the same names after which a pattern is compiled for them. Compiling takes
milliseconds."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
match_target: Final = re.compile(rb"[!-~]+").fullmatch
"""Matches path and query of a request: visible ASCII, so that no byte can end the line early."""
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_find_names: Final = re.compile(rb"\n([^:]+):").findall
"""Finds the names of a head that is valid."""
_TEXT: Final = rb"[\t -~\x80-\xff]*"
_VALUE: Final = rb"[!-~\x80-\xff]" + _TEXT + rb"(?<![\t ])"
"""A usual header value: not empty, and without surrounding blanks."""
_PLAIN_VALUES: Final = {b"content-length": rb"[0-9]{1,18}", b"connection": rb"keep-alive"}
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;.*)?[ \t]*")
# 18 digits fit into a signed 64-bit number; no object has so many bytes.
_MAX_LENGTH_DIGITS: Final = 18
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_POOL_HEADERS: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection"))
"""Headers that only the pool sets."""
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\r\n") + b"\x7f"

# Header names in lower case, by the names as received. Services send the same dozen names in each
# response: a dictionary hit costs 20 ns, checking a name and converting it 320 ns.
_names: dict[bytes, bytes] = {}
# Templates by the joined names of a head.
_templates: dict[bytes, HeadTemplate] = {}


class Headers(dict[bytes, bytes]):
    """Header fields of a response, by name in lower case.

    The values of repeated fields are joined with `b", "`. Callers must not change the dictionary.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        # Without values: a Location or a cookie may contain a signature.
        return f"Headers({', '.join(name.decode('latin-1') for name in self)})"


class HeadTemplate:
    """Header names of a response, in order. Most responses of a service have the same names.

    One compiled pattern parses such a head in a third of the time of parsing line by line.

    Attributes:
        names: The names in lower case.
        repeated: Names that occur more than once, each with the indices of its values.
        num_seen: Number of heads with these names.
        pattern: Matches a whole head that is HTTP/1.1, kept alive and not chunked; its groups are
            the status and the values. `parse_head` returns the same for every head that the pattern
            matches. None if no pattern was compiled.
    """

    __slots__ = ("names", "num_seen", "pattern", "repeated")

    def __init__(self, names: tuple[bytes, ...]) -> None:
        self.names = names
        indices: dict[bytes, list[int]] = {}
        for index, name in enumerate(names):
            indices.setdefault(name, []).append(index)
        self.repeated = [(name, at) for name, at in indices.items() if len(at) > 1]
        self.pattern: re.Pattern[bytes] | None = None
        self.num_seen = 0

    def compile(self, raw_names: list[bytes]) -> None:
        """Compile the pattern for names as received.

        There is none for heads with Transfer-Encoding, or that repeat a name on which the framing
        depends. Cloud Storage repeats `x-goog-hash`, once for each checksum.
        """
        is_plain = _PLAIN_VALUES.keys().isdisjoint(name for name, _ in self.repeated)
        if is_plain and b"transfer-encoding" not in self.names:
            fields = [
                re.escape(raw) + b": (" + _PLAIN_VALUES.get(name, _VALUE) + rb")\r\n"
                for raw, name in zip(raw_names, self.names, strict=True)
            ]
            status_line = rb"HTTP/1\.1 ([1-9][0-9]{2})(?: " + _TEXT + rb")?\r\n"
            self.pattern = re.compile(status_line + b"".join(fields) + rb"\r\n")


class ResponseHead(NamedTuple):
    """Status, header fields and framing of a response."""

    status: int
    headers: Headers
    http_minor: int
    keep_alive: bool
    content_length: int | None
    chunked: bool


def encode_head(
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    fixed: bytes = b"",
) -> bytes:
    """Encode the head of a request, including the empty line at its end.

    Args:
        method: Method, for example `b"GET"`.
        target: Path and query, percent-encoded.
        headers: Names and values, in the order in which they are sent.
        fixed: Encoded header lines that are sent before `headers`.

    Raises:
        ValueError: The method, target, or a name or value contains a character that is invalid
            there, such as a line end.
    """
    if match_target(target) is None:
        raise ValueError("target must be percent-encoded: visible ASCII only, no spaces")
    if method not in _names:
        _checked_name(method, ValueError)
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, fixed, encode_fields(headers))


def encode_fields(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode header lines, each with its line end.

    Raises:
        ValueError: A name is not a token, or of a header that the pool sets; or a value contains a
            line end or NUL.
    """
    parts: list[bytes] = []
    for field in headers:
        name = _names.get(field[0]) or _checked_name(field[0], ValueError)
        if name in _POOL_HEADERS:
            raise ValueError(f"the pool sets the header {name!r} itself; do not pass it")
        parts.append(b": ".join(field))
    parts.append(b"")
    lines = b"\r\n".join(parts)
    # Checked once for all lines, which is three times as fast as in each value.
    if len(lines) - len(lines.translate(None, b"\r\n\0")) != 2 * len(headers):
        raise ValueError("header values must not contain CR, LF or NUL")
    return lines


def parse_head(data: bytes) -> tuple[ResponseHead, HeadTemplate]:
    """Parse the head of a response.

    Args:
        data: The head, from the status line to the empty line, both included.

    Returns:
        The head, and the template that the next head of the server probably matches.

    Raises:
        ProtocolError: The head is invalid, or its framing is ambiguous.
    """
    if len(data) > MAX_HEAD_BYTES:
        raise ProtocolError(f"response head is over {MAX_HEAD_BYTES} bytes")
    if not data.endswith(b"\r\n\r\n"):
        raise ProtocolError("response head does not end with an empty line")
    lines = data[:-4].split(b"\r\n")
    num_ends = len(lines) + 1
    if data.count(b"\n") != num_ends or data.count(b"\r") != num_ends:
        raise ProtocolError("response head contains a bare CR or LF")
    if len(data.translate(None, _CONTROLS)) != len(data):
        raise ProtocolError("response head contains a control character")
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise ProtocolError(f"not an HTTP/1.1 status line: {lines[0][:40]!r}")
    fields = _parse_fields(lines)
    head = _decode_framing(int(match[2]), 1 if match[1] == b"1" else 0, fields)
    return head, _template_of(data)


def match_head(
    template: HeadTemplate, data: bytes | bytearray, end: int
) -> tuple[ResponseHead, int] | None:
    """Parse the head at the start of `data[:end]`, if it is complete and matches a template.

    Returns:
        The head, and the offset of its body. None if the head does not match, and `parse_head` must
        parse it.
    """
    match = None if template.pattern is None else template.pattern.match(data, 0, end)
    if match is None:
        return None
    status, *values = match.groups()
    # The pattern has a group for each name. `strict=True` takes 0.1 us.
    fields = Headers(zip(template.names, values))  # noqa: B905
    for name, indices in template.repeated:
        fields[name] = b", ".join([values[index] for index in indices])
    length = fields.get(b"content-length")
    content_length = None if length is None else int(length)
    # Twice as fast as `ResponseHead(...)`.
    head = tuple.__new__(ResponseHead, (int(status), fields, 1, True, content_length, False))
    return head, match.end()


def _template_of(data: bytes) -> HeadTemplate:
    """Return the template for the names of a valid head, and count the head."""
    raw_names = _find_names(data)
    joined = b":".join(raw_names)
    template = _templates.get(joined)
    if template is None:
        if len(_templates) >= _MAX_CACHED_TEMPLATES:
            # Delete the oldest template; connections that use it still refer to it.
            del _templates[next(iter(_templates))]
        template = _templates[joined] = HeadTemplate(tuple(raw.lower() for raw in raw_names))
    template.num_seen += 1
    if template.num_seen == _MIN_SEEN:
        template.compile(raw_names)
    return template


def _parse_fields(lines: list[bytes]) -> Headers:
    """Return the fields in all lines after the first; values of repeated fields are joined."""
    fields = Headers()
    lower_name = _names.get
    for index in range(1, len(lines)):
        raw, colon, value = lines[index].partition(b":")
        if not colon:
            raise ProtocolError("a header line has no colon")
        name = lower_name(raw) or _checked_name(raw, ProtocolError)
        value = value.strip(b" \t")
        fields[name] = fields[name] + b", " + value if name in fields else value
    return fields


def _checked_name(raw: bytes, error: type[Exception]) -> bytes:
    """Return a name in lower case; raise `error` if the name is not a token."""
    if _TOKEN.fullmatch(raw) is None:
        raise error(f"not a valid HTTP token: {raw[:40]!r}")
    name = bytes(raw).lower()
    if len(_names) < _MAX_CACHED_NAMES:
        _names[bytes(raw)] = name
    return name


def _decode_framing(status: int, http_minor: int, fields: Headers) -> ResponseHead:
    """Return a head, with its framing decoded from its fields."""
    coding = fields.get(b"transfer-encoding")
    length = fields.get(b"content-length")
    connection = fields.get(b"connection")
    keep_alive = http_minor == 1
    if keep_alive and connection is not None and connection != b"keep-alive":
        tokens = connection.lower().split(b",")
        keep_alive = all(token.strip(b" \t") != b"close" for token in tokens)
    content_length = None
    if length is not None:
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
            length = _repeated_length(length)
        content_length = int(length)
    if coding is not None:
        if content_length is not None:
            raise ProtocolError("response has both Content-Length and Transfer-Encoding")
        if coding.lower() != b"chunked" or not http_minor:
            raise ProtocolError(
                f"unsupported transfer coding {coding[:40]!r} in HTTP/1.{http_minor}"
            )
    chunked = coding is not None
    return ResponseHead(status, fields, http_minor, keep_alive, content_length, chunked)


def _repeated_length(joined: bytes) -> bytes:
    """Return the value of a Content-Length header that was sent several times with one value."""
    lengths = {part.strip(b" \t") for part in joined.split(b",")}
    length = lengths.pop()
    if lengths or not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
        raise ProtocolError(f"no single valid Content-Length: {joined[:40]!r}")
    return length


class ChunkedDecoder:
    """Incremental decoder of a chunked body.

    Attributes:
        is_done: The last chunk and the trailers were read. Trailers are checked and dropped.
    """

    __slots__ = ("_line", "_num_trailer_bytes", "_read_line", "_remaining", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._line = bytearray()
        self._num_trailer_bytes = 0
        self._remaining = 0
        # Method that reads the next line of framing. It sets the method for the line after that.
        self._read_line = self._read_size

    def feed(self, data: bytes | bytearray, start: int, end: int, body: list[memoryview]) -> int:
        """Append the payload in `data[start:end]` to `body`, as views.

        Returns:
            The offset after the last byte used: `end`, or the end of the body if `is_done`.

        Raises:
            ProtocolError: The framing is invalid. The payload before the error is in `body`.
        """
        view = memoryview(data)
        while start < end and not self.is_done:
            if self._remaining:
                num_bytes = min(self._remaining, end - start)
                body.append(view[start : start + num_bytes])
                self._remaining -= num_bytes
                start += num_bytes
            else:
                start = self._feed_line(data, start, end)
        return start

    def _feed_line(self, data: bytes | bytearray, start: int, end: int) -> int:
        """Append the bytes up to the next LF to the current line; read the line if it is whole."""
        newline = data.find(b"\n", start, end)
        stop = end if newline < 0 else newline + 1
        self._line += data[start:stop]
        if len(self._line) > _MAX_CHUNK_LINE_BYTES:
            raise ProtocolError(f"a line of chunked framing is over {_MAX_CHUNK_LINE_BYTES} bytes")
        if newline >= 0:
            line = bytes(self._line)
            self._line.clear()
            if line[-2:] != b"\r\n" or b"\r" in line[:-2]:
                raise ProtocolError("a line of chunked framing contains a bare CR or LF")
            if len(line.translate(None, _CONTROLS)) != len(line):
                raise ProtocolError("chunked framing contains a control character")
            self._read_line(line[:-2])
        return stop

    def _read_size(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(f"not a chunk size: {line[:40]!r}")
        self._remaining = int(match[1], 16)
        self._read_line = self._read_end_of_chunk if self._remaining else self._read_trailer

    def _read_end_of_chunk(self, line: bytes) -> None:
        if line:
            raise ProtocolError("a chunk is longer than its size")
        self._read_line = self._read_size

    def _read_trailer(self, line: bytes) -> None:
        self._num_trailer_bytes += len(line)
        if self._num_trailer_bytes > _MAX_TRAILER_BYTES:
            raise ProtocolError(f"trailers are over {_MAX_TRAILER_BYTES} bytes")
        if not line:
            self.is_done = True
        elif not _FRAMING.isdisjoint(_parse_fields([b"", line])):
            raise ProtocolError("a trailer field declares framing")


RESENDABLE: Final = frozenset((b"GET", b"HEAD"))
"""Methods of requests that the pool sends again if the server had closed the idle connection.

PUT and DELETE are idempotent (RFC 9110, 9.2.2), but not listed. If a PUT with a precondition is
sent again after its response was lost, the service may reject it because the first PUT succeeded.
Only a caller that knows of both requests can distinguish this from a conflict with another writer.
"""
BODY_METHODS: Final = frozenset((b"POST", b"PUT", b"PATCH"))
"""Methods whose requests need `Content-Length: 0` if they have no body (RFC 9110, 8.6)."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a server."""

    scheme: str
    """`http` or `https`."""
    host: str
    """Host name or address; an IPv6 address without brackets."""
    port: int
    """TCP port."""

    def __post_init__(self) -> None:
        if self.scheme not in _DEFAULT_PORTS:
            raise ValueError(f"scheme must be http or https, not {self.scheme!r}")
        if not self.host or not self.host.isascii() or not self.host.isprintable():
            raise ValueError(f"host must be an ASCII name or address, not {self.host!r}")
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be between 1 and 65535, not {self.port!r}")

    @classmethod
    def from_url(cls, url: str) -> Origin:
        """Return the origin of an http or https url, without its path and query.

        Raises:
            ValueError: The url has another scheme, a user name or a password, or no valid host or
                port.
        """
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("a url must not contain credentials")
        port = _DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
        return cls(parts.scheme, parts.hostname or "", port)

    @property
    def address(self) -> str:
        """Host and port, also if the port is the default; an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authority(self) -> bytes:
        """Value of the Host header, without the default port of the scheme."""
        default = f":{_DEFAULT_PORTS[self.scheme]}"
        return self.address.removesuffix(default).encode("ascii")

    @property
    def url(self) -> str:
        """The origin as a url without a path."""
        return f"{self.scheme}://{self.authority.decode()}"


class FixedHeaders:
    """Headers of many requests, checked and encoded once.

    Attributes:
        items: Names and values, in the order in which they are sent.
        encoded: The encoded header lines.
    """

    __slots__ = ("encoded", "items")

    def __init__(self, items: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Check and encode the headers.

        Raises:
            ValueError: As raised by `encode_fields`.
        """
        self.items = tuple(items)
        self.encoded = encode_fields(self.items)
