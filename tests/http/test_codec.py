"""Heads and chunked bodies, with h11 as the oracle."""

from __future__ import annotations

import pickle
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._http.codec import (
    MAX_HEAD_BYTES,
    ChunkedDecoder,
    Headers,
    encode_head,
    parse_head,
)
from aioflux._http.errors import ConnectionLostError, ProtocolError
from tests.http.oracle import FRAMING, names, without_spelling

values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(str.encode)


def h11_reads(data: bytes) -> tuple[int, dict[bytes, bytes], object]:
    """Return status, fields and framing as h11 reads them."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    event = connection.next_event()
    assert isinstance(event, (h11.Response, h11.InformationalResponse))
    fields: dict[bytes, bytes] = {}
    for name, value in event.headers:
        fields[name] = fields[name] + b", " + value if name in fields else value
    framing = h11._connection._body_framing(b"GET", event) if event.status_code >= 200 else None
    return event.status_code, fields, framing


def our_framing(head: object) -> object:
    if head.status < 200:
        return None
    if head.status in (204, 304):
        return "content-length", (0,)
    if head.chunked:
        return "chunked", ()
    if head.content_length is None:
        return "http/1.0", ()
    return "content-length", (head.content_length,)


@st.composite
def response_heads(draw: st.DrawFn) -> bytes:
    status = draw(st.integers(200, 599))
    fields = draw(st.lists(st.tuples(names, values), max_size=6))
    fields = [pair for pair in fields if pair[0].lower() not in FRAMING]
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        fields.append((b"Content-Length", b"%d" % draw(st.integers(0, 10**12))))
    elif framing == "chunked":
        fields.append((b"Transfer-Encoding", b"chunked"))
    fields = draw(st.permutations(fields))
    lines = [b"HTTP/1.1 %d OK" % status, *(name + b": " + value for name, value in fields)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


@given(response_heads())
def test_valid_heads_read_as_h11_reads_them(data: bytes) -> None:
    head = parse_head(data)[0]
    assert (head.status, dict(head.headers.items()), our_framing(head)) == h11_reads(data)


# Pieces that make framing ambiguous, for the mutations to draw from.
NASTY = [
    b"\r", b"\n", b"\0", b" ", b"\t", b":", b",", b"\x0b", b"\x7f", b"\x80", b"\r\n ", b"1",
    b"Content-Length: 5\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: +5\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Connection: close\r\n",
]  # fmt: skip


@given(response_heads(), st.data())
def test_what_h11_rejects_is_rejected_and_the_rest_is_framed_alike(
    valid: bytes, data: st.DataObject
) -> None:
    mutated = valid[:-4]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(mutated)))
        end = data.draw(st.integers(start, min(start + 3, len(mutated))))
        mutated = mutated[:start] + data.draw(st.sampled_from(NASTY)) + mutated[end:]
    mutated += b"\r\n\r\n"
    mutated = mutated[: mutated.index(b"\r\n\r\n") + 4]
    try:
        head = parse_head(mutated)[0]
    except ProtocolError:
        return
    fields = without_spelling(dict(head.headers.items()))
    assert (head.status, fields, our_framing(head)) == h11_reads(mutated)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\n", id="space-before-colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", id="folded"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            id="length-and-coding",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", id="two-lengths"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="negative"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 0x1\r\n\r\n", id="hex-length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n", id="empty-length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", id="gzip"),
        pytest.param(b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", id="1.0-chunked"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n", id="bare-CR"),
        pytest.param(b"HTTP/1.1 200 OK\nA: b\r\n\r\n", id="bare-LF"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n", id="NUL"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\r\n", id="no-end"),
        pytest.param(b"HTTP/2.0 200 OK\r\n\r\n", id="HTTP/2"),
        pytest.param(b"HTTP/1.1 20 OK\r\n\r\n", id="short-status"),
        pytest.param(b"\r\nHTTP/1.1 200 OK\r\n\r\n", id="leading-empty-line"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", id="long"),
    ],
)
def test_an_ambiguous_head_is_rejected(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_head(data)[0]


@pytest.mark.parametrize(
    ("data", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: foo, close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
def test_keep_alive_follows_version_and_connection_header(data: bytes, keep_alive: bool) -> None:
    assert parse_head(data)[0].keep_alive is keep_alive


def test_repeated_fields_are_joined_and_a_repeated_equal_length_is_one() -> None:
    head = parse_head(
        b"HTTP/1.1 200\r\nA: 1\r\na:2\r\nContent-Length: 7\r\nContent-Length: 7\r\n\r\n"
    )[0]
    assert head.headers.get(b"a") == b"1, 2"
    assert head.headers.get(b"b", b"none") == b"none"
    assert head.content_length == 7


def test_headers_pickle_and_their_repr_shows_no_values() -> None:
    headers = Headers({b"location": b"https://a/?signature=secret"})
    assert pickle.loads(pickle.dumps(headers)) == headers
    assert "secret" not in repr(headers)


def test_a_transport_error_pickles_with_its_fields() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nETag: a\r\n\r\n")[0]
    error = ConnectionLostError("lost", num_bytes_received=7, head=head, request_sent=True)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConnectionLostError
    assert (str(copy), copy.num_bytes_received, copy.head, copy.request_sent) == (
        "lost", 7, head, True,
    )  # fmt: skip


@given(names, values, names, values)
def test_encoded_heads_read_back(method: bytes, target: bytes, name: bytes, value: bytes) -> None:
    if name.lower() in FRAMING | {b"host", b"expect", b"connection"}:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(encode_head(method, b"/" + target, [(name, value)], b"Host: a\r\n"))
    request = server.next_event()
    assert (request.method, request.target) == (method, b"/" + target)
    assert list(request.headers)[1] == (name.lower(), value)


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        pytest.param(b"G T", b"/", [], id="space-in-method"),
        pytest.param(b"GET\r\n", b"/", [], id="CRLF-in-method"),
        pytest.param(b"GET", b"/a b", [], id="space-in-target"),
        pytest.param(b"GET", b"/a\r\nb", [], id="CRLF-in-target"),
        pytest.param(b"GET", b"/a\0", [], id="NUL-in-target"),
        pytest.param(b"GET", b"/\xc3\xa4", [], id="target-not-ASCII"),
        pytest.param(b"GET", b"", [], id="empty-target"),
        pytest.param(b"GET", b"/", [(b"A", b"b\r\nC: d")], id="CRLF-in-value"),
        pytest.param(b"GET", b"/", [(b"A", b"b\n")], id="LF-in-value"),
        pytest.param(b"GET", b"/", [(b"A", b"b\0")], id="NUL-in-value"),
        pytest.param(b"GET", b"/", [(b"A b", b"c")], id="space-in-name"),
        pytest.param(b"GET", b"/", [(b"A:", b"c")], id="colon-in-name"),
        pytest.param(b"GET", b"/", [(b"", b"c")], id="empty-name"),
    ],
)
def test_a_head_that_could_be_split_is_never_sent(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(ValueError, match=r"token|contain|target"):
        encode_head(method, target, headers)


def decode(data: bytes, cuts: list[int]) -> tuple[bytes, bytes, bool]:
    """Return payload, the bytes after the body, and whether it is complete, for data in pieces."""
    decoder = ChunkedDecoder()
    payload = bytearray()
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        body: list[memoryview] = []
        stop = decoder.feed(data, start, end, body)
        for piece in body:
            payload += piece
        if decoder.is_done:
            return bytes(payload), data[stop:], True
    return bytes(payload), b"", False


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.data())
def test_chunked_payload_is_the_same_for_all_pieces(
    chunks: list[bytes], data: st.DataObject
) -> None:
    extension = data.draw(st.sampled_from([b"", b";a", b';a="b"', b"  "]))
    trailer = data.draw(st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nZ: \r\n"]))
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks)
    framed += b"0\r\n" + trailer + b"\r\n"
    cuts = data.draw(st.lists(st.integers(0, len(framed)), max_size=12))
    assert decode(framed + b"next", cuts) == (b"".join(chunks), b"next", True)
    assert decode(framed, list(range(len(framed)))) == (b"".join(chunks), b"", True)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"5\nhello\r\n", id="LF-alone"),
        pytest.param(b"+5\r\nhello\r\n", id="sign"),
        pytest.param(b"0x5\r\nhello\r\n", id="prefix"),
        pytest.param(b"\r\nhello\r\n", id="no-size"),
        pytest.param(b"5\r\nhello!\r\n", id="longer-than-its-size"),
        pytest.param(b"5\r\nhelloX\n", id="no-CRLF-after"),
        pytest.param(b"5;\ra\r\nhello\r\n", id="CR-in-extension"),
        pytest.param(b"5;\0\r\nhello\r\n", id="NUL-in-extension"),
        pytest.param(b"11111111111111111\r\n", id="over-64-bit"),
        pytest.param(b"5;" + b"a" * 5000, id="endless-line"),
        pytest.param(b"0\r\nbad trailer\r\n\r\n", id="bad-trailer"),
        pytest.param(b"0\r\n" + b"A: b\r\n" * 5000, id="endless-trailers"),
        pytest.param(b"0\r\nContent-Length: 5\r\n\r\n", id="length-in-trailers"),
        pytest.param(b"0\r\ntransfer-Encoding: gzip\r\n\r\n", id="coding-in-trailers"),
    ],
)
def test_bad_chunked_framing_is_rejected(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, [])


def test_names_are_read_alike_after_more_than_are_cached() -> None:
    for num in range(600):
        head = parse_head(b"HTTP/1.1 200 OK\r\nX-Number-%d: a\r\n\r\n" % num)[0]
        assert dict(head.headers) == {b"x-number-%d" % num: b"a"}
