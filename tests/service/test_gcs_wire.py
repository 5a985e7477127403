"""How Cloud Storage writes things."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux.service import _gcs_wire as wire
from aioflux.service._base import Precondition


@given(st.integers(0, 2**32 - 1))
def test_a_checksum_comes_back(value: int) -> None:
    text = wire.encode_crc32c(value)
    assert len(text) == 8
    assert wire.decode_crc32c(text) == value
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
    resource = wire.decode_resource(
        b'{"kind":"storage#object","name":"a/b","size":"7","etag":"e","generation":"12",'
        b'"crc32c":"AAAAAg==","updated":"2024-05-01T10:20:30.123Z","contentType":"text/csv",'
        b'"storageClass":"NEARLINE","metadata":{"label":"cat"},"unknown":[1]}'
    )
    meta = wire.meta_from_resource(resource, key="b", uri="gs://x/a/b")
    assert (meta.size, meta.generation, meta.crc32c) == (7, "12", 2)
    assert meta.updated == datetime(2024, 5, 1, 10, 20, 30, 123_000, UTC)
    assert (meta.content_type, dict(meta.metadata)) == ("text/csv", {"label": "cat"})


def test_an_empty_page_is_a_page() -> None:
    page = wire.decode_page(b'{"kind":"storage#objects"}')
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
def test_an_error_body_tells_its_message(body: bytes, message: str) -> None:
    assert wire.decode_error(body) == message


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
