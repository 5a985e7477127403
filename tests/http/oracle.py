"""Generated responses, valid and damaged, and two readers to compare: h11 and `Connection`."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h11
from hypothesis import strategies as st

from aioflux._http import Connection, TransportError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

    from aioflux._http import Response

MAX_BODY_BYTES = 4096
"""Bytes of memory that a body is received into; no response generated here has a longer body."""


class Stream:
    """The bytes that a server sends after one request, before it closes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __repr__(self) -> str:
        runs = re.sub(rb"(?s)(.)\1{50,}", lambda run: run[1] + b"...%d..." % len(run[0]), self.data)
        return f"Stream({runs!r})"


# The two readers.


@dataclass
class Reading:
    """The result of reading one response."""

    payload: bytes
    """The body, or the part of it before the failure."""
    error: Exception | None = None
    """The reason why there is no complete response."""
    status: int = 0
    fields: dict[bytes, bytes] | None = None
    is_reusable: bool = False
    """Another request may follow on this connection."""

    def as_tuple(self) -> tuple[int, dict[bytes, bytes], bytes]:
        return self.status, without_spelling(self.fields or {}), self.payload


def without_spelling(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return fields as h11 returns them: without the case of a coding, and with one length."""
    plain = dict(fields)
    if (length := plain.get(b"content-length")) is not None:
        plain[b"content-length"] = b"".join({part.strip() for part in length.split(b",")})
    if (coding := plain.get(b"transfer-encoding")) is not None:
        plain[b"transfer-encoding"] = coding.lower()
    return plain


class H11:
    """One connection of h11."""

    def __init__(self) -> None:
        # No limit on the head: `_RULES` and `stricter_by` cover the limit of `Connection`.
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=10**7)

    def read(self, method: bytes, stream: Stream) -> Reading:
        connection = self._connection
        connection.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
        connection.send(h11.EndOfMessage())
        connection.receive_data(stream.data)
        payload = bytearray()
        response: h11.Response | None = None
        ended = False
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as exc:
                return Reading(bytes(payload), exc)
            match event:
                case h11.NEED_DATA if not ended:
                    connection.receive_data(b"")
                    ended = True
                case h11.NEED_DATA | h11.ConnectionClosed():
                    return Reading(bytes(payload), EOFError("no whole response"))
                case h11.Response():
                    response = event
                case h11.Data():
                    payload += event.data
                case h11.EndOfMessage():
                    break
        assert response is not None
        fields: dict[bytes, bytes] = {}
        for name, value in response.headers:
            fields[name] = fields[name] + b", " + value if name in fields else value
        reusable = connection.their_state is h11.DONE and connection.trailing_data == (b"", False)
        if reusable:
            connection.start_next_cycle()
        return Reading(bytes(payload), None, response.status_code, fields, reusable)


class Transport(asyncio.Transport):
    """A transport that records what is written and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.sent += piece

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class FedConnection:
    """A `Connection` that receives the bytes that a test feeds."""

    def __init__(self, transport: Transport | None = None, *, is_tls: bool = False) -> None:
        self.transport = Transport() if transport is None else transport
        self.connection = Connection(on_lost=lambda _: None, is_tls=is_tls)
        self.connection.connection_made(self.transport)

    def start(self, method: bytes, into: str) -> tuple[asyncio.Future[Response], bytearray]:
        """Send a request with a destination: memory, a function, bytes, or none."""
        memory = bytearray(MAX_BODY_BYTES)
        destinations: dict[str, Any] = {
            "memory": memoryview(memory),
            "function": lambda _: memoryview(memory),
            "bytes": bytes,
        }
        future = self.queue(
            b"%b / HTTP/1.1\r\nHost: a\r\n\r\n" % method,
            into=destinations.get(into),
            is_head=method == b"HEAD",
            max_body_bytes=MAX_BODY_BYTES,
        )
        self.connection.flush()
        return future, memory

    def send(self, head: bytes, body: Iterable[bytes]) -> asyncio.Future[Response]:
        """Send a request with a body."""
        future = self.queue(head, body)
        self.connection.flush()
        return future

    def queue(
        self,
        head: bytes = b"GET / HTTP/1.1\r\n\r\n",
        body: Iterable[bytes] = (),
        *,
        into: Any = None,
        is_head: bool = False,
        max_body_bytes: int | None = None,
    ) -> asyncio.Future[Response]:
        """Pass a request to the connection, which writes it at the next flush."""
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.connection.send(
            head,
            [memoryview(piece) for piece in body],
            is_head=is_head,
            into=into,
            max_body_bytes=max_body_bytes,
            head_seconds=1,
            future=future,
        )
        return future

    def feed(self, stream: bytes, cuts: Iterable[int]) -> None:
        """Feed the bytes as a loop does, each cut in a recv of its own."""
        start = 0
        for cut in sorted({*cuts, len(stream)}):
            while start < cut and not self.transport.is_aborted:
                buffer = self.connection.get_buffer(-1)
                num_bytes = min(len(buffer), cut - start)
                buffer[:num_bytes] = stream[start : start + num_bytes]
                self.connection.buffer_updated(num_bytes)
                start += num_bytes

    def lose(self) -> None:
        """Close from the server's side."""
        if not self.transport.is_aborted:
            self.connection.eof_received()
            self.connection.connection_lost(None)

    def read(self, method: bytes, stream: Stream, *, cuts: Iterable[int], into: str) -> Reading:
        future, memory = self.start(method, into)
        self.feed(stream.data, cuts)
        is_reusable = self.connection.is_usable
        if not future.done():
            self.lose()
        error = future.exception()
        if error is not None:
            assert isinstance(error, TransportError)
            assert not self.connection.is_usable
            assert into not in {"none", "bytes"} or not error.num_bytes_received
            return Reading(bytes(memory[: error.num_bytes_received]), error)
        response = future.result()
        assert response.num_bytes == len(response.body)
        if into == "memory" and 200 <= response.status < 300:
            assert response.body == memory[: response.num_bytes]
        if into == "bytes" and 200 <= response.status < 300:
            assert type(response.body) is bytes
        return Reading(
            bytes(response.body),
            None,
            response.status,
            dict(response.headers.items()),
            is_reusable,
        )


# The rules by which `Connection` is stricter than h11.

_HEAD_END = re.compile(rb"\n\r?\n")
_RULES = {
    "a bare CR or LF": re.compile(rb"(?<!\r)\n|\r(?!\n)"),
    "a control character": re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"),
    "a folded line": re.compile(rb"\n[ \t]"),
    "a version that is neither 1.0 nor 1.1": re.compile(rb"\A(?!HTTP/1\.[01] )"),
    "a transfer coding in HTTP/1.0": re.compile(rb"(?is)\AHTTP/1\.0.*\ntransfer-encoding:"),
    "a length of over 18 digits": re.compile(rb"(?i)\ncontent-length:[^\n]*[0-9]{19}"),
    "both framings": re.compile(
        rb"(?is)\n(content-length:.*\ntransfer-encoding:|transfer-encoding:.*\ncontent-length:)"
    ),
}
_CHUNK_RULES = {
    "a bare CR or LF": _RULES["a bare CR or LF"],
    "a control character": _RULES["a control character"],
    "a folded line": _RULES["a folded line"],
    "a chunk size of over 16 digits": re.compile(rb"(?m)^[0-9A-Fa-f]{17}"),
    "a chunk line of over 4096 bytes": re.compile(rb"[^\n]{4096}"),
    "framing in the trailers": re.compile(
        rb"(?im)^0+[^\n]*\n(?:[^\n]+\n)*?(content-length|transfer-encoding):"
    ),
    "trailers of over 16 KiB": re.compile(rb"(?ms)^0+[^\n]*\n.{16384}"),
}


def stricter_by(stream: bytes) -> Iterator[str]:
    """Yield the names of the rules by which `Connection` rejects a stream that h11 accepts."""
    head = b""
    num_interim = 0
    while (end := _HEAD_END.search(stream)) is not None:
        head, stream = stream[: end.end()], stream[end.end() :]
        yield from (name for name, rule in _RULES.items() if rule.search(head))
        if len(head) > 64 * 1024:
            yield "a head of over 64 KiB"
        if not re.match(rb"HTTP/[0-9.]+ 1", head):
            break
        num_interim += 1
        if num_interim > 16:
            yield "more than 16 interim responses"
    if b"chunked" not in head.lower():
        return
    framing = _framing(stream)
    yield from (name for name, rule in _CHUNK_RULES.items() if rule.search(framing))


def _framing(stream: bytes) -> bytes:
    """Return the framing of a chunked body without its payload, read leniently."""
    lines = bytearray()
    while (newline := stream.find(b"\n")) >= 0:
        line, stream = stream[: newline + 1], stream[newline + 1 :]
        lines += line
        size = re.match(rb"[0-9A-Fa-f]+", line)
        if size is None or not int(size[0], 16):
            break
        stream = stream[int(size[0], 16) :]
        lines += stream[:2]
        stream = stream[2:]
    return bytes(lines + stream)


# Responses.

TOKEN = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
names = st.text(TOKEN, min_size=1, max_size=12).map(str.encode)
values = st.one_of(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(str.encode),
    st.sampled_from([b"", b"a b", b"a\tb", b"caf\xc3\xa9", b"\xff", b'"x, y"', b"a: b"]),
)
paddings = st.sampled_from([b" ", b"", b"  ", b"\t", b" \t "])
FRAMING = {b"content-length", b"transfer-encoding", b"connection"}


@st.composite
def _fields(draw: st.DrawFn, own: list[tuple[bytes, bytes]]) -> bytes:
    """Generate header lines: some of any kind, and those given, in any order and case."""
    fields = draw(st.lists(st.tuples(names, values), max_size=4))
    fields = [pair for pair in fields if pair[0].lower() not in FRAMING]
    spell = st.sampled_from([bytes, bytes.lower, bytes.upper])
    fields += [(draw(spell)(name), value) for name, value in own]
    return b"".join(
        b"%b:%b%b%b\r\n" % (name, draw(paddings), value, draw(paddings))
        for name, value in draw(st.permutations(fields))
    )


@st.composite
def _chunked(draw: st.DrawFn) -> bytes:
    size = st.sampled_from([b"%x", b"%X", b"0%x", b"%015x"])
    extension = st.sampled_from([b"", b"", b";a", b';a="b;c"', b"; a=b", b" ", b";x\t"])
    body = b"".join(
        draw(size) % len(data) + draw(extension) + b"\r\n" + data + b"\r\n"
        for data in draw(st.lists(st.binary(min_size=1, max_size=30), max_size=4))
    )
    trailers = draw(st.one_of(st.just(b""), _fields([])))
    return body + draw(st.sampled_from([b"0", b"000"])) + draw(extension) + b"\r\n" + trailers


@st.composite
def responses(draw: st.DrawFn) -> Stream:
    """Generate one response."""
    stream = b""
    for status in draw(st.lists(st.sampled_from([100, 102, 103, 199]), max_size=2)):
        stream += b"HTTP/1.1 %d Wait\r\n" % status + draw(_fields([])) + b"\r\n"
    status = draw(st.one_of(st.sampled_from([200, 206, 204, 304, 416, 503]), st.integers(200, 599)))
    minor = draw(st.sampled_from([1, 1, 1, 0]))
    own: list[tuple[bytes, bytes]] = []
    connection = draw(st.sampled_from([b"", b"", b"close", b"Keep-Alive", b"x, CLOSE", b"upgrade"]))
    if connection:
        own.append((b"Connection", connection))
    framings = ["length", "length", "two-lengths", "close", *(["chunked"] * 2 * minor)]
    framing = draw(st.sampled_from(framings))
    if framing == "chunked":
        own.append((b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked"]))))
        body = draw(_chunked()) + b"\r\n"
    else:
        body = draw(st.binary(max_size=80))
        lengths = {"length": [b"%d"], "two-lengths": draw(st.sampled_from([[b"%d", b"%d"],
                   [b"%d, %d"], [b"0%d"]])), "close": []}[framing]  # fmt: skip
        own += [(b"Content-Length", length.replace(b"%d", b"%d" % len(body))) for length in lengths]
    reason = draw(st.sampled_from([b" OK", b"", b" ", b" Not Found", b" caf\xe9", b" a\tb"]))
    head = b"HTTP/1.%d %d%b\r\n" % (minor, status, reason) + draw(_fields(own)) + b"\r\n"
    if draw(st.integers(0, 30)) == 0:
        # Just below and just above the maximum length of a head.
        room = 64 * 1024 - len(head) - len(b"Pad: \r\n") + draw(st.integers(-1, 1))
        head = head[:-2] + b"Pad: " + b"p" * room + b"\r\n\r\n"
    return Stream(stream + head + body)


NASTY = [
    b"\r", b"\n", b"\0", b" ", b"\t", b":", b";", b",", b"\x0b", b"\x0c", b"\x1f", b"\x7f", b"\x80",
    b"\r\n ", b"\r\n\t", b"\r\n\r\n", b"\n\n", b"0", b"1", b"f", b"-", b"+", b"0x", b" :",
    b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"0\r\n\r\n", b"0" * 16, b"9" * 17, b"9" * 21,
    b"Content-Length: 5\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: +5\r\n",
    b"Content-Length: 5, 6\r\n", b"Content-Length : 5\r\n", b"Content-Length:\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: \tchunked\r\n",
    b"Connection: close\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 101 Go\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 17, b"HTTP/1.1 200 OK\r\n\r\n", b";" + b"e" * 4096,
    b"X: " + b"y" * 16_380 + b"\r\n",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> Stream:
    """Generate a response that is overwritten, extended, repeated or cut off, once or twice."""
    stream = draw(responses()).data
    for _ in range(draw(st.integers(1, 2))):
        # Framing is at the start of lines, so damage there finds more defects.
        edges = [0, *(at.end() for at in re.finditer(rb"\r\n|: |;", stream))]
        start = draw(st.one_of(st.sampled_from(edges), st.integers(0, len(stream))))
        end = draw(st.integers(start, min(start + 4, len(stream))))
        match draw(st.sampled_from(["nasty", "nasty", "bytes", "repeat", "truncate"])):
            case "nasty":
                stream = stream[:start] + draw(st.sampled_from(NASTY)) + stream[end:]
            case "bytes":
                stream = stream[:start] + draw(st.binary(max_size=4)) + stream[end:]
            case "repeat":
                end = draw(st.integers(start, min(start + 60, len(stream))))
                stream = stream[:end] + stream[start:end] + stream[end:]
            case _:
                stream = stream[:start]
    return Stream(stream)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return a damaged copy at a fiftieth of the cost, for searches that need no shrinking."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        edges = [0, *(at.end() for at in re.finditer(rb"\r\n|: |;", data))]
        start = rng.choice(edges) if rng.random() < 0.5 else rng.randrange(len(data) + 1)
        near = min(len(data), start + rng.randrange(5))
        far = min(len(data), start + rng.randrange(60))
        data = rng.choice(
            [
                data[:start] + rng.choice(NASTY) + data[near:],
                data[:start] + rng.choice(NASTY) + data[near:],
                data[:start] + rng.randbytes(rng.randrange(3)) + data[near:],
                data[:far] + data[start:far] + data[far:],
                data[:start] + data[near:],
            ]
        )
    return data
