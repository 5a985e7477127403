"""Heads that match a template are read as by `parse_head`."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux._http import codec as _codec
from tests.http.oracle import names

if TYPE_CHECKING:
    from types import ModuleType


def fresh_codec() -> Any:
    """Import the codec again, with empty caches."""
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


def template_of(codec: Any, data: bytes) -> Any:
    """Return the template of a head that was read often enough."""
    for _ in range(8):
        _, template = codec.parse_head(data)
    return template


def as_tuple(head: Any) -> object:
    fields = list(head.headers.items())
    return head.status, fields, head.http_minor, head.keep_alive, head.content_length, head.chunked


def matches(codec: Any, template: Any, data: bytes, rest: bytes = b"") -> bool:
    """Return whether the template matches a head; if so, `parse_head` must return the same."""
    memory = bytearray(data + rest)
    found = codec.match_head(template, memory, len(memory))
    if found is None:
        return False
    head, stop = found
    assert stop == memory.index(b"\r\n\r\n") + 4
    assert as_tuple(head) == as_tuple(codec.parse_head(bytes(memory[:stop]))[0])
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
name_lists = st.lists(st.one_of(seldom_names, names), max_size=6)
rests = st.sampled_from([b"", b"body", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\nFoo: 1\r\n\r\n"])
NASTY = [
    b"\r", b"\n", b"\r\n", b"\0", b"\x0b", b"\x0c", b"\x1c", b"\x7f", b"\t", b" ", b":", b": ",
    b": \n", b"\r\n ", b"\r\n\r\n", b"\n\r", b"X: ", b"\nX", b"\r\nFoo: a", b"Foo", b"9" * 12,
]  # fmt: skip


def ordinary(raw_names: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return values with which a head is valid."""
    own = {b"connection": b"keep-alive", b"transfer-encoding": b"chunked"}
    if b"transfer-encoding" not in {name.lower() for name in raw_names}:
        own[b"content-length"] = b"5"
    return [(name, own.get(name.lower(), b"x")) for name in raw_names]


def has_pattern(template: Any) -> bool:
    """Return whether ordinary heads match the template: not if a name of the framing repeats."""
    framing = (b"content-length", b"connection")
    is_plain = all(template.names.count(name) <= 1 for name in framing)
    return is_plain and b"transfer-encoding" not in template.names


@given(name_lists, status_lines, rests, st.data())
@settings(max_examples=max(20, settings().max_examples // 2))
def test_a_head_that_matches_is_read_as_by_parse_head(
    raw_names: list[bytes], status_line: bytes, rest: bytes, data: st.DataObject
) -> None:
    codec = fresh_codec()
    try:
        template = template_of(codec, plain(b"HTTP/1.1 200 OK", ordinary(raw_names)))
    except codec.ProtocolError:  # both framings
        return
    assert template.names == tuple(name.lower() for name in raw_names)
    is_match = matches(codec, template, plain(b"HTTP/1.1 200 OK", ordinary(raw_names)), rest)
    assert is_match == has_pattern(template)
    for _ in range(4):
        lines = [
            name
            + data.draw(separators)
            + data.draw(values)
            + data.draw(st.sampled_from([b"", b" "]))
            for name in raw_names
        ]
        matches(codec, template, head_of([status_line, *lines]), rest)


@given(name_lists, rests, st.data())
@settings(max_examples=max(20, settings().max_examples // 2))
def test_a_damaged_head_that_matches_is_read_as_by_parse_head(
    raw_names: list[bytes], rest: bytes, data: st.DataObject
) -> None:
    codec = fresh_codec()
    valid = plain(b"HTTP/1.1 200 OK", ordinary(raw_names))
    try:
        template = template_of(codec, valid)
    except codec.ProtocolError:  # both framings
        return
    assert matches(codec, template, valid, rest) == has_pattern(template)
    for _ in range(5):
        mutated = valid
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(mutated)))
            end = data.draw(st.integers(start, min(start + 3, len(mutated))))
            mutated = mutated[:start] + data.draw(st.sampled_from(NASTY)) + mutated[end:]
        matches(codec, template, mutated, rest)


def test_the_heads_of_one_service_are_matched_from_the_ninth_on() -> None:
    """The other tests need this."""
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
        _, template = codec.parse_head(data)
    assert matches(codec, template, data, b"body")
    assert matches(codec, template, plain(b"HTTP/1.1 503", fields))
    for cut in range(len(data)):
        assert codec.match_head(template, data, cut) is None


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
def test_lines_are_not_confused_with_those_of_a_template(data: bytes) -> None:
    codec = fresh_codec()
    assert not matches(codec, template_of(codec, plain(b"HTTP/1.1 200 OK", KNOWN)), data)


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
def test_an_unusual_value_does_not_match(name: bytes, value: bytes) -> None:
    codec = fresh_codec()
    template = template_of(codec, plain(b"HTTP/1.1 200 OK", ordinary([name])))
    assert not matches(codec, template, plain(b"HTTP/1.1 200 OK", [(name, value)]))


def test_repeated_names_are_joined() -> None:
    """As Cloud Storage sends `x-goog-hash`, once for each checksum."""
    codec = fresh_codec()
    data = head_of([b"HTTP/1.1 200 OK", b"Foo: 1", b"Bar: 3", b"foo: 2", b"FOO: 4"])
    template = template_of(codec, data)
    assert matches(codec, template, data)
    head, _ = codec.match_head(template, data, len(data))
    assert list(head.headers.items()) == [(b"foo", b"1, 2, 4"), (b"bar", b"3")]


def test_the_caches_are_bounded() -> None:
    """A server that always sends new names and orders costs no memory."""
    codec = fresh_codec()

    def sizes() -> list[int]:
        return [
            len(cache)
            for name, cache in vars(codec).items()
            if isinstance(cache, dict) and not name.startswith("__")
        ]

    for num in range(2000):
        data = head_of([b"HTTP/1.1 200 OK %d" % num, b"X-%d: a" % num, b"Content-Length: 7"])
        head, template = codec.parse_head(data)
        assert dict(head.headers) == {b"x-%d" % num: b"a", b"content-length": b"7"}
        codec.encode_head(b"GET", b"/%d" % num, [(b"Y-%d" % num, b"a")])
        if num == 1000:
            full = sizes()
    assert sizes() == full
    assert sum(full) < 1000
    # Names that repeat still get a template.
    for _ in range(20):
        _, template = codec.parse_head(head_of([b"HTTP/1.1 200 OK", b"Again: a"]))
    assert template.pattern is not None
