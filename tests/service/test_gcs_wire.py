"""How Cloud Storage writes things."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._services.base import Precondition
from aioflux._services.gcs import listing, wire
from aioflux._services.responses import decode_crc32c, encode_crc32c, parse_http_date
from aioflux._values.meta import ObjectAttributes

if TYPE_CHECKING:
    from collections.abc import Callable


@given(st.integers(0, 2**32 - 1))
def test_a_checksum_comes_back(value: int) -> None:
    text = encode_crc32c(value)
    assert len(text) == 8
    assert decode_crc32c(text) == value
    for header in (f"crc32c={text}", f"md5=abc==,crc32c={text}", f"crc32c={text},md5=abc=="):
        assert wire.hash_crc32c(header.encode()) == value
        assert wire.hash_crc32c(header.replace(",", ", ").encode()) == value


@pytest.mark.parametrize("header", [None, b"", b"md5=abc=="])
def test_no_checksum_is_none(header: bytes | None) -> None:
    assert wire.hash_crc32c(header) is None


def test_headers_become_metadata() -> None:
    headers = {
        b"etag": b'"abc"',
        b"x-goog-generation": b"1700000000000001",
        b"x-goog-hash": b"crc32c=AAAAAQ==,md5=xyz==",
        b"last-modified": b"Sun, 06 Nov 1994 08:49:37 GMT",
        b"content-type": b"image/png",
        b"x-goog-stored-content-encoding": b"gzip",
        b"x-goog-storage-class": b"STANDARD",
    }
    meta = wire.meta_from_headers(headers, key="k", uri="gs://b/k", size=5)
    assert (meta.key, meta.uri, meta.size) == ("k", "gs://b/k", 5)
    assert (meta.etag, meta.generation, meta.crc32c) == ("abc", "1700000000000001", 1)
    assert meta.updated == datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
    assert (meta.content_type, meta.content_encoding) == ("image/png", "gzip")
    assert meta.storage_class == "STANDARD"


def test_headers_that_are_not_there_leave_fields_empty() -> None:
    meta = wire.meta_from_headers({}, key="k", uri="gs://b/k", size=0)
    assert (meta.etag, meta.generation, meta.crc32c, meta.updated) == ("", "", None, None)
    encoded = {b"x-goog-stored-content-encoding": b"identity"}
    assert wire.meta_from_headers(encoded, key="k", uri="", size=0).content_encoding == ""


def test_a_resource_becomes_metadata() -> None:
    resource = listing.decode_resource(
        b'{"kind":"storage#object","name":"a/b","size":"7","etag":"e","generation":"12",'
        b'"crc32c":"AAAAAg==","timeCreated":"2024-05-01T10:20:30.123Z","contentType":"text/csv",'
        b'"storageClass":"NEARLINE","metadata":{"label":"cat"},"unknown":[1]}'
    )
    meta = listing.meta_from_resource(resource, key="b", uri="gs://x/a/b")
    assert (meta.size, meta.generation, meta.crc32c) == (7, "12", 2)
    assert meta.updated == datetime(2024, 5, 1, 10, 20, 30, 123_000, UTC)
    assert (meta.content_type, dict(meta.metadata)) == ("text/csv", {"label": "cat"})


def test_an_empty_page_is_a_page() -> None:
    page = listing.decode_page(b'{"kind":"storage#objects"}')
    assert (page.items, page.prefixes, page.next_page_token) == ([], [], "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"code":404,"message":"No such object"}}', "No such object"),
        (b'{"error":{}}', ""),
        (b'{"error":"flat"}', ""),
        (b"<html>", ""),
        (b"", ""),
    ],
)
def test_an_error_body_reports_its_message(body: bytes, message: str) -> None:
    assert listing.decode_error(body) == message


@pytest.mark.parametrize(
    ("precondition", "expected"),
    [
        (Precondition(), None),
        (Precondition(if_absent=True), "0"),
        (Precondition(if_generation_match="17"), "17"),
    ],
    ids=["none", "absent", "match"],
)
def test_a_precondition_is_a_generation(precondition: Precondition, expected: str | None) -> None:
    headers, params = (
        wire.precondition_headers(precondition),
        wire.precondition_params(precondition),
    )
    if expected is None:
        assert not headers
        assert not params
        return
    assert headers == [(b"x-goog-if-generation-match", expected.encode())]
    assert params == {"ifGenerationMatch": expected}


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1))
def test_a_key_is_one_segment_of_a_path(key: str) -> None:
    quoted = wire.quote_key(key)
    assert quoted.isascii()
    assert not set(quoted) & set("/?# ")


@pytest.mark.parametrize("text", ["AAAA", "AAAAAQ", "!!!!", "AAAAAAAAAA=="])
def test_a_damaged_checksum_is_no_checksum(text: str) -> None:
    with pytest.raises(ValueError, match=r"4 bytes|base64|adding"):
        wire.hash_crc32c(f"crc32c={text},md5=xyz==".encode())
    assert decode_crc32c("") is None


def page(*names: str, prefixes: tuple[str, ...] = (), token: str = "") -> listing.ObjectsPage:
    return listing.ObjectsPage(
        kind="storage#objects",
        items=[listing.ListedObject(name=name) for name in names],
        prefixes=list(prefixes),
        next_page_token=token,
    )


def check(
    found: listing.ObjectsPage, prefix: str = "", start: str = "", end: str = "", token: str = ""
) -> None:
    listing.check_page(found, prefix=prefix, start_offset=start, end_offset=end, page_token=token)


@given(st.lists(st.text(max_size=4), max_size=8), st.text(max_size=2), st.text(max_size=2))
def test_a_page_is_believed_where_it_is_sorted_below_its_prefix(
    names: list[str], prefix: str, start: str
) -> None:
    below = sorted({prefix + name for name in names if prefix + name >= start})
    check(page(*below), prefix, start=start)
    is_right = names == sorted(set(names)) and all(
        name.startswith(prefix) and name >= start for name in names
    )
    try:
        check(page(*names), prefix, start=start)
    except ValueError:
        assert not is_right
    else:
        assert is_right


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: check(page("a", "c", "b")), "'b' follows 'c'"),
        (lambda: check(page("a", "a")), "'a' follows 'a'"),
        (lambda: check(page("a", prefixes=("b/", "a/"))), "'a/' follows 'b/'"),
        (lambda: check(page("p/a", "q"), "p/"), "'q' is not below 'p/'"),
        (lambda: check(page(prefixes=("o/",)), "p/"), "'o/' is not below 'p/'"),
        (lambda: check(page("a", "b"), start="b"), "'a' is before 'b'"),
        (lambda: check(page("a", "b"), end="b"), "'b' is not before 'b'"),
        (lambda: check(page("a", token="t"), token="t"), "same page again"),
    ],
)
def test_a_page_that_was_not_requested_is_refused(call: Callable[[], None], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_pages_follow_each_other() -> None:
    check(page("a", "b", prefixes=("c/", "d/"), token="2"), start="a", end="c", token="1")
    check(page(token="2"), "p/")


@pytest.mark.parametrize("body", [b"{}", b'{"kind":"storage#buckets"}', b'{"error":{}}', b"[]"])
def test_what_is_no_page_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"kind is|Expected"):
        listing.decode_page(body)


tokens = st.text("abcXYZ019-_.", min_size=1, max_size=8)
texts = st.text(st.characters(codec="utf-8"), max_size=12)


@given(st.dictionaries(tokens.map(str.lower), texts, max_size=4))
def test_metadata_comes_back_from_headers(metadata: dict[str, str]) -> None:
    try:
        headers = wire.object_headers(ObjectAttributes(content_type="text/csv", metadata=metadata))
    except ValueError:
        # Only what a header would not bring back as it was.
        assert any(
            value != value.strip() or not value.replace("\t", " ").isprintable()
            for value in metadata.values()
        )
        return
    meta = wire.meta_from_headers(
        {name.lower(): value for name, value in headers}, key="k", uri="", size=0
    )
    assert (meta.metadata, meta.content_type) == (metadata, "text/csv")


@pytest.mark.parametrize(
    "metadata",
    [
        {"a b": "1"},
        {"": "1"},
        {"é": "1"},
        {"a:": "1"},
        {"a": "1\r\nHost: b"},
        {"a": " 1"},
        {"a": "\0"},
    ],
)
def test_metadata_that_no_header_can_carry_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        wire.object_headers(ObjectAttributes(metadata=metadata))


def test_metadata_that_is_not_utf_8_is_latin_1() -> None:
    headers = {b"x-goog-meta-place": b"Z\xfcrich", b"x-goog-metageneration": b"1"}
    meta = wire.meta_from_headers(headers, key="k", uri="", size=0)
    assert meta.metadata == {"place": "Zürich"}


@pytest.mark.parametrize("expected", ["abc", "1.5", "-1", "", "²"])
def test_a_generation_of_another_service_is_refused(expected: str) -> None:
    for write in (wire.precondition_headers, wire.precondition_params):
        with pytest.raises(ValueError, match="not a generation of Cloud Storage"):
            write(Precondition(if_generation_match=expected))


@pytest.mark.parametrize("text", ["", "yesterday", "Sun, 06 Non 1994 08:49:37 GMT"])
def test_another_form_of_date_is_none(text: str) -> None:
    assert parse_http_date(text) is None
