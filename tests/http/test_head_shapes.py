"""Heads of a shape that was seen before are matched by a pattern, to the same end as any other."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._http import codec as _codec
from tests.http.oracle import names

if TYPE_CHECKING:
    from types import ModuleType


def fresh_codec() -> Any:
    """The codec once more, with memories of its own: those of the process are bounded."""
    name = "codec_under_test"
    spec = importlib.util.spec_from_file_location(name, _codec.__file__)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def head_of(lines: list[bytes]) -> bytes:
    return b"\r\n".join(lines) + b"\r\n\r\n"


def plain(status_line: bytes, fields: list[tuple[bytes, bytes]]) -> bytes:
    return head_of([status_line, *(name + b": " + value for name, value in fields)])


def shape_of(codec: Any, data: bytes) -> Any:
    """The shape of a head that was seen often enough; None where it is not remembered."""
    for _ in range(codec._MIN_SIGHTS):
        _, shape = codec.parse_head(data)
    return shape


def told(head: Any) -> object:
    fields = list(head.headers.items())
    return head.status, fields, head.http_minor, head.keep_alive, head.content_length, head.chunked


def matches(codec: Any, shape: Any, data: bytes, rest: bytes = b"") -> bool:
    """Whether the pattern takes a head; where it does, the rules for any head say the same."""
    memory = bytearray(data + rest)
    found = codec.match_head(shape, memory, len(memory))
    if found is None:
        return False
    head, stop = found
    assert stop == memory.index(b"\r\n\r\n") + 4
    assert told(head) == told(codec.parse_head(bytes(memory[:stop]))[0])
    return True


seldom_names = st.sampled_from(
    [b"Foo", b"X", b"Bar", b"Content-Length", b"Connection", b"Transfer-Encoding", b"foo", b"A"]
)
values = st.one_of(
    st.sampled_from(
        [b"", b" ", b"a", b"a: b", b": ", b":", b"a:", b" : a: ", b"a  b", b"a\tb", b"\xff", b"5"]
    ),
    st.sampled_from([b"keep-alive", b"close", b"chunked", b"05", b"+5", b"5, 5", b"9" * 19]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12).map(str.encode),
)
separators = st.sampled_from([b": ", b": ", b": ", b":", b":  ", b":\t", b" : "])
blanks = st.sampled_from([b"", b"", b" "])
status_lines = st.sampled_from(
    [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 206 Partial Content",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 404 Not: Found",
        b"HTTP/1.1 503",
        b"HTTP/1.1 100 Continue",
        b"HTTP/1.1 200 \t",
        b"HTTP/1.1 099 No",
        b"HTTP/2.0 200 OK",
    ]
)
name_lists = st.lists(st.one_of(seldom_names, names), max_size=6, unique_by=bytes.lower)
rests = st.sampled_from([b"", b"body", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\nFoo: 1\r\n\r\n"])
NASTY = [
    b"\r", b"\n", b"\r\n", b"\0", b"\x0b", b"\x0c", b"\x1c", b"\x7f", b"\t", b" ", b":", b": ",
    b": \n", b"\r\n ", b"\r\n\r\n", b"\n\r", b"X: ", b"\nX", b"\r\nFoo: a", b"Foo", b"9" * 12,
]  # fmt: skip


def ordinary(raw_names: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Values with which a head is valid."""
    own = {b"connection": b"keep-alive", b"transfer-encoding": b"chunked"}
    if b"transfer-encoding" not in {name.lower() for name in raw_names}:
        own[b"content-length"] = b"5"
    return [(name, own.get(name.lower(), b"x")) for name in raw_names]


def is_for_patterns(shape: Any) -> bool:
    """Whether ordinary heads of a shape are for its pattern: all but those in pieces."""
    return b"transfer-encoding" not in shape.names


@given(name_lists, status_lines, rests, st.data())
def test_what_a_pattern_takes_is_read_as_any_head(
    raw_names: list[bytes], status_line: bytes, rest: bytes, data: st.DataObject
) -> None:
    codec = fresh_codec()
    try:
        shape = shape_of(codec, plain(b"HTTP/1.1 200 OK", ordinary(raw_names)))
    except codec.ProtocolError:  # both framings
        return
    assert shape.names == tuple(name.lower() for name in raw_names)
    takes = matches(codec, shape, plain(b"HTTP/1.1 200 OK", ordinary(raw_names)), rest)
    assert takes == is_for_patterns(shape)
    for _ in range(4):
        lines = [
            name
            + data.draw(separators)
            + data.draw(values)
            + data.draw(st.sampled_from([b"", b" "]))
            for name in raw_names
        ]
        matches(codec, shape, head_of([status_line, *lines]), rest)


@given(name_lists, rests, st.data())
def test_what_a_pattern_takes_of_damaged_heads_is_read_as_any_head(
    raw_names: list[bytes], rest: bytes, data: st.DataObject
) -> None:
    codec = fresh_codec()
    valid = plain(b"HTTP/1.1 200 OK", ordinary(raw_names))
    try:
        shape = shape_of(codec, valid)
    except codec.ProtocolError:  # both framings
        return
    assert matches(codec, shape, valid, rest) == is_for_patterns(shape)
    for _ in range(5):
        mutated = valid
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(mutated)))
            end = data.draw(st.integers(start, min(start + 3, len(mutated))))
            mutated = mutated[:start] + data.draw(st.sampled_from(NASTY)) + mutated[end:]
        matches(codec, shape, mutated, rest)


def test_the_heads_of_one_service_are_matched_from_the_ninth_on() -> None:
    """Otherwise nothing here says anything."""
    codec = fresh_codec()
    fields = [
        (b"Content-Type", b"application/octet-stream; charset=x"),
        (b"Content-Length", b"102400"),
        (b"ETag", b'"a:  b"'),
        (b"X-Goog-Hash", b"crc32c=AAAAAA=="),
        (b"Date", b"Sat, 21 Nov 2026 18:00:00 GMT"),
        (b"Connection", b"keep-alive"),
    ]
    data = plain(b"HTTP/1.1 206 Partial Content", fields)
    for _ in range(8):
        _, shape = codec.parse_head(data)
        assert shape is not None
    assert matches(codec, shape, data, b"body")
    assert matches(codec, shape, plain(b"HTTP/1.1 503", fields))
    for cut in range(len(data)):
        assert codec.match_head(shape, data, cut) is None


KNOWN = [(b"Foo", b"1"), (b"Bar", b"2")]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo\r\nX: Bar: y\r\n\r\n", id="a line without a colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: Bar: y\r\n\r\n", id="a name in a value"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: a: \nBar: y\r\n\r\n", id="LF in a value"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: a\nBar: y\r\n\r\n", id="LF between lines"),
        pytest.param(b"HTTP/1.1 200 OK: \nFoo: 1\r\nBar: 2\r\n\r\n", id="LF in the status line"),
        pytest.param(b"HTTP/1.1 200 OK: Foo: 1\r\nBar: 2\r\n\r\n", id="a name in the status line"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo:\nBar: 1\r\n\r\n", id="both names in one"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo : 1\r\nBar: 2\r\n\r\n", id="blank before a colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: 1\r\n Bar: 2\r\n\r\n", id="folded"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: 1\r\n\r\nBar: 2\r\n\r\n", id="an empty line"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: 1\0\r\nBar: 2\r\n\r\n", id="NUL"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: 1\x7f\r\nBar: 2\r\n\r\n", id="DEL"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: 1\x0b\r\nBar: 2\r\n\r\n", id="VT at the end"),
        pytest.param(b"HTTP/1.1 200 OK\r\nFoo: 1\r\r\nBar: 2\r\n\r\n", id="CR at the end"),
    ],
)
def test_lines_are_not_confused_with_those_of_a_known_shape(data: bytes) -> None:
    codec = fresh_codec()
    assert not matches(codec, shape_of(codec, plain(b"HTTP/1.1 200 OK", KNOWN)), data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"Content-Length", b"+5"),
        (b"Content-Length", b"5, 5"),
        (b"Content-Length", b"9" * 19),
        (b"Connection", b"close"),
        (b"Connection", b"keep-alive, close"),
        (b"Connection", b"Keep-Alive"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Foo", b""),
        (b"Foo", b"a "),
        (b"Foo", b" a"),
        (b"Foo", b"\ta"),
    ],
)
def test_what_is_not_ordinary_is_for_the_rules_of_any_head(name: bytes, value: bytes) -> None:
    codec = fresh_codec()
    shape = shape_of(codec, plain(b"HTTP/1.1 200 OK", ordinary([name])))
    assert not matches(codec, shape, plain(b"HTTP/1.1 200 OK", [(name, value)]))


def test_names_told_twice_are_joined_however_often_that_was_read() -> None:
    codec = fresh_codec()
    data = head_of([b"HTTP/1.1 200 OK", b"Foo: 1", b"foo: 2", b"Bar: 3"])
    for _ in range(20):
        head, shape = codec.parse_head(data)
        assert dict(head.headers) == {b"foo": b"1, 2", b"bar": b"3"}
        assert shape is None


def test_what_is_remembered_is_bounded() -> None:
    """A server that sends new names and orders for ever takes no memory."""
    codec = fresh_codec()

    def sizes() -> list[int]:
        return [
            len(memory)
            for name, memory in vars(codec).items()
            if isinstance(memory, dict) and not name.startswith("__")
        ]

    for num in range(2000):
        data = head_of([b"HTTP/1.1 200 OK %d" % num, b"X-%d: a" % num, b"Content-Length: 7"])
        head, shape = codec.parse_head(data)
        assert dict(head.headers) == {b"x-%d" % num: b"a", b"content-length": b"7"}
        codec.encode_head(b"GET", b"/%d" % num, [(b"Y-%d" % num, b"a")])
        if num == 1000:
            full = sizes()
    assert sizes() == full
    assert sum(full) < 1000
    # Those that come again are remembered all the same.
    for _ in range(20):
        _, shape = codec.parse_head(head_of([b"HTTP/1.1 200 OK", b"Again: a"]))
    assert shape.pattern is not None
