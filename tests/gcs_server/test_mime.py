"""Bodies of several parts, whatever bytes they hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing.gcs_server import APIError, Request
from aioflux.testing.gcs_server._mime import split_body

HEADER = (b"Content-Type", b"multipart/related; boundary=xy")
PIECES = st.sampled_from(
    [b"--xy", b"--x", b"xy", b"--", b"\r", b"\n", b"\r\n", b"a", b"\0\xff", b" "]
)
DATA = st.lists(PIECES, max_size=8).map(b"".join)


def split(body: bytes) -> list[bytes]:
    return [bytes(part.data) for part in split_body(Request("POST", b"/", [HEADER], [body]))]


@settings(max_examples=50)
@given(st.lists(DATA, min_size=1, max_size=3), st.sampled_from([b"\r\n", b"\n"]), st.booleans())
def test_parts_come_back_as_they_were_put_together(parts, end, has_headers):
    whole = end + end.join(parts) + end
    if b"\n--xy" in whole:
        return  # such a boundary must not be chosen
    head = b"A: b" + end + end if has_headers else end
    lines = [b"--xy" + end + head + part + end for part in parts]
    assert split(b"".join(lines) + b"--xy--") == parts


@settings(max_examples=60)
@given(DATA)
def test_any_body_is_split_or_rejected(body):
    try:
        split(body)
    except APIError:
        return
    assert b"--xy--" in body


@pytest.mark.parametrize(
    "content_type",
    ["multipart/related; boundary=xy", 'Multipart/Related; charset=u; boundary="xy"'],
)
def test_a_boundary_may_be_quoted(content_type):
    request = Request(
        "POST", b"/", [(b"content-type", content_type.encode())], [b"--xy\n\na\n--xy--"]
    )
    assert [bytes(part.data) for part in split_body(request)] == [b"a"]


def test_header_names_have_no_case():
    request = Request("POST", b"/", [HEADER], [b"--xy\r\nCONTENT-type: a\r\n\r\nb\r\n--xy--\r\n"])
    (part,) = split_body(request)
    assert (dict(part.headers), bytes(part.data)) == ({"content-type": "a"}, b"b")


def test_a_part_without_a_blank_line_has_no_data():
    assert split(b"--xy\r\nA: b\r\n--xy--") == [b""]


def test_a_body_may_be_a_view():
    request = Request("POST", b"/", [HEADER], [memoryview(b"--xy\n\na\n--xy--")])
    assert [bytes(part.data) for part in split_body(request)] == [b"a"]
