"""HTTP/1.1 heads and the chunked coding as pure functions over bytes.

Stricter than RFC 9112 asks of a client, because of a response that two parsers could frame
differently no byte can be trusted: no whitespace before a colon, no folded lines, no bare CR or LF,
not both Content-Length and Transfer-Encoding, no transfer coding but `chunked`, neither of them in
trailers. Whatever h11 rejects is rejected here too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflux._http.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_HEAD_BYTES",
    "ChunkedDecoder",
    "HeadTemplate",
    "Headers",
    "ResponseHead",
    "encode_fields",
    "encode_head",
    "match_head",
    "match_target",
    "parse_head",
]

MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_CHUNK_LINE_BYTES: Final = 4096
_MAX_TRAILER_BYTES: Final = 16 * 1024
_MAX_CACHED_NAMES: Final = 512
_MAX_CACHED_TEMPLATES: Final = 64
_MIN_SEEN: Final = 8
"""Heads with the same names before a pattern is compiled for them, which takes milliseconds."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
match_target: Final = re.compile(rb"[!-~]+").fullmatch
"""Matches path and query of a request; no byte of them can end the line early."""
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_TEXT: Final = rb"[\t -~\x80-\xff]*"
_VALUE: Final = rb"[!-~\x80-\xff]" + _TEXT + rb"(?<![\t ])"
"""A usual value: not empty, and without blanks around it."""
_PLAIN_VALUES: Final = {b"content-length": rb"[0-9]{1,18}", b"connection": rb"keep-alive"}
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;.*)?[ \t]*")
# 18 digits fit a signed 64-bit number; nothing stored is longer.
_MAX_LENGTH_DIGITS: Final = 18
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\r\n") + b"\x7f"

# Checked names, as received -> in lower case. A service always sends the same dozen names: a
# dictionary hit costs 20 ns, matching and lowering a name 320.
_names: dict[bytes, bytes] = {}
# The names of a whole head, joined -> its template.
_templates: dict[bytes, HeadTemplate] = {}


class Headers(dict[bytes, bytes]):
    """Fields of a response: names in lower case, repeated fields joined with `b", "`.

    A dictionary, because each response has one. Not to be changed.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        # Without values: a Location or a cookie may carry a signature.
        return f"Headers({', '.join(name.decode('latin-1') for name in self)})"


class HeadTemplate:
    """The names of a head and their order, which repeat in every response of a service.

    One compiled pattern reads such a head in a third of the time that it takes line by line.

    Attributes:
        names: The names in lower case, without repetition.
        pattern: Matches a whole head; its groups are status and values. `parse_head` would return
            the same for whatever it matches: HTTP/1.1, kept alive, not chunked.
    """

    __slots__ = ("_num_seen", "names", "pattern")

    def __init__(self, names: tuple[bytes, ...]) -> None:
        self.names = names
        self.pattern: re.Pattern[bytes] | None = None
        self._num_seen = 0

    def count(self, raw_names: list[bytes]) -> None:
        """Count a head; compile the pattern once there were enough."""
        self._num_seen += 1
        if self._num_seen == _MIN_SEEN and b"transfer-encoding" not in self.names:
            fields = [
                re.escape(raw) + b": (" + _PLAIN_VALUES.get(name, _VALUE) + rb")\r\n"
                for raw, name in zip(raw_names, self.names, strict=True)
            ]
            status_line = rb"HTTP/1\.1 ([1-9][0-9]{2})(?: " + _TEXT + rb")?\r\n"
            self.pattern = re.compile(status_line + b"".join(fields) + rb"\r\n")


class ResponseHead(NamedTuple):
    """Status line and fields of a response, and its framing."""

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
    """Encode the head of a request, the empty line included.

    Args:
        method: Method, for example `b"GET"`.
        target: Path and query, already percent-encoded.
        headers: Names and values in the order in which they are sent.
        fixed: Lines that `encode_fields` returned for headers before these.

    Raises:
        ValueError: A part could end its line early or start another one.
    """
    if match_target(target) is None:
        raise ValueError("target must be percent-encoded: visible ASCII only, no spaces")
    if method not in _names:
        _checked_name(method, ValueError)
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, fixed, encode_fields(headers))


def encode_fields(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode the lines of headers, each with its end.

    Raises:
        ValueError: A part could end its line early or start another one.
    """
    parts: list[bytes] = []
    for field in headers:
        if field[0] not in _names:
            _checked_name(field[0], ValueError)
        parts.append(b": ".join(field))
    parts.append(b"")
    lines = b"\r\n".join(parts)
    # Once for all lines: three searches in each value take three times as long.
    if len(lines) - len(lines.translate(None, b"\r\n\0")) != 2 * len(headers):
        raise ValueError("header values must not contain CR, LF or NUL")
    return lines


def parse_head(data: bytes) -> tuple[ResponseHead, HeadTemplate | None]:
    """Parse the head of a response.

    Args:
        data: The head, from the status line to the empty line, both included.

    Returns:
        The head, and the template that the server's next head may match; None if a name repeats.

    Raises:
        ProtocolError: The head is invalid, or its framing could be read in two ways.
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
    fields = _split_lines(lines)
    template = _template_of(lines, fields) if len(fields) == len(lines) - 1 else None
    return _frame(int(match[2]), 1 if match[1] == b"1" else 0, fields), template


def match_head(
    template: HeadTemplate, data: bytes | bytearray, end: int
) -> tuple[ResponseHead, int] | None:
    """Parse the head at the start of `data[:end]`, if it is complete and matches a template.

    Returns:
        The head, and the offset of its body; None if `parse_head` is needed.
    """
    found = None if template.pattern is None else template.pattern.match(data, 0, end)
    if found is None:
        return None
    status, *values = found.groups()
    fields = Headers(zip(template.names, values, strict=True))
    length = fields.get(b"content-length")
    content_length = None if length is None else int(length)
    # Not by `ResponseHead()`, whose call takes twice the time.
    head = tuple.__new__(ResponseHead, (int(status), fields, 1, True, content_length, False))
    return head, found.end()


def _template_of(lines: list[bytes], fields: Headers) -> HeadTemplate:
    """Return the template of heads with these names, and count this one."""
    raw_names = [line.partition(b":")[0] for line in lines[1:]]
    joined = b":".join(raw_names)
    template = _templates.get(joined)
    if template is None:
        if len(_templates) >= _MAX_CACHED_TEMPLATES:
            # The oldest; a connection that uses it keeps it.
            del _templates[next(iter(_templates))]
        template = _templates[joined] = HeadTemplate(tuple(fields))
    if template.pattern is None:
        template.count(raw_names)
    return template


def _split_lines(lines: list[bytes]) -> Headers:
    """Return names and values of the lines after the first, repeated fields joined."""
    fields = Headers()
    known = _names.get
    for index in range(1, len(lines)):
        raw, colon, value = lines[index].partition(b":")
        if not colon:
            raise ProtocolError("a header line has no colon")
        name = known(raw) or _checked_name(raw, ProtocolError)
        value = value.strip(b" \t")
        fields[name] = fields[name] + b", " + value if name in fields else value
    return fields


def _checked_name(raw: bytes, error: type[Exception]) -> bytes:
    """Return the lower-case form of a name; raise `error` if it is not a token."""
    if _TOKEN.fullmatch(raw) is None:
        raise error(f"not a valid HTTP token: {raw[:40]!r}")
    name = bytes(raw).lower()
    if len(_names) < _MAX_CACHED_NAMES:
        _names[bytes(raw)] = name
    return name


def _frame(status: int, http_minor: int, fields: Headers) -> ResponseHead:
    """Return a head with the framing that its fields declare."""
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
            length = _single_length(length)
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


def _single_length(joined: bytes) -> bytes:
    """Return the value of a Content-Length that is repeated with one value."""
    lengths = {part.strip(b" \t") for part in joined.split(b",")}
    length = lengths.pop()
    if lengths or not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
        raise ProtocolError(f"no single valid Content-Length: {joined[:40]!r}")
    return length


class ChunkedDecoder:
    """Incremental decoder of a chunked body.

    Attributes:
        is_done: The last chunk and its trailers were read; trailers are checked and dropped.
    """

    __slots__ = ("_line", "_num_trailer_bytes", "_read_line", "_remaining", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._line = bytearray()
        self._num_trailer_bytes = 0
        self._remaining = 0
        # Reads the next line, and sets the reader of the line after it.
        self._read_line = self._read_size

    def feed(self, data: bytes | bytearray, start: int, end: int, body: list[memoryview]) -> int:
        """Append the views of `data[start:end]` that are payload to `body`.

        Returns:
            `end`, or one past the end of the body if `is_done`.

        Raises:
            ProtocolError: The framing is invalid; what is in `body` came before that.
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
        """Collect one line up to its LF, and read it once it is complete."""
        newline = data.find(b"\n", start, end)
        stop = end if newline < 0 else newline + 1
        self._line += data[start:stop]
        if len(self._line) > _MAX_CHUNK_LINE_BYTES:
            raise ProtocolError(f"a line of chunked framing is over {_MAX_CHUNK_LINE_BYTES} bytes")
        if newline >= 0:
            line = bytes(self._line)
            self._line.clear()
            if line[-2:] != b"\r\n" or b"\r" in line[:-2]:
                raise ProtocolError("a line of chunked framing does not end with CRLF alone")
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
            raise ProtocolError("a chunk is longer than its size says")
        self._read_line = self._read_size

    def _read_trailer(self, line: bytes) -> None:
        self._num_trailer_bytes += len(line)
        if self._num_trailer_bytes > _MAX_TRAILER_BYTES:
            raise ProtocolError(f"trailers are over {_MAX_TRAILER_BYTES} bytes")
        if not line:
            self.is_done = True
        elif not _FRAMING.isdisjoint(_split_lines([b"", line])):
            raise ProtocolError("a trailer field declares framing, after the body")
