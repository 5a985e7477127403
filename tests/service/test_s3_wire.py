"""How S3 writes things, and what its answers are worth: rules over values."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioflux import ChecksumError, NotFoundError, PermissionDeniedError, PreconditionFailedError
from aioflux._services.base import Precondition, ReadRequest
from aioflux._services.responses import Failure
from aioflux._services.s3 import endpoint as sites
from aioflux._services.s3 import listing, wire
from aioflux._services.s3.wire import deletion_error, error_in_success, service_error
from aioflux._services.s3.writes import copy_headers, delete_body, fits_xml, plan_copy
from aioflux._values.meta import ObjectAttributes
from tests.service.responses import response

ETAG = "5d41402abc4b2a76b9719d911017c592"
TOLD = {b"etag": f'"{ETAG}"'.encode()}
PIN = wire.Pin(ETAG, 5)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)

# --- where a bucket is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket", "settings", "host", "root"),
    [
        ("data-1", {}, b"data-1.s3.eu-west-3.amazonaws.com", b""),
        ("with.dots", {}, b"s3.eu-west-3.amazonaws.com", b"/with.dots"),
        ("data-1", {"addressing": "path"}, b"s3.eu-west-3.amazonaws.com", b"/data-1"),
        ("data-1", {"endpoint_url": "http://h:81"}, b"h:81", b"/data-1"),
        (
            "data-1",
            {"endpoint_url": "http://h:81", "addressing": "virtual"},
            b"data-1.h:81",
            b"",
        ),
        (
            "data-1",
            {"endpoint_url": "https://s3.dualstack.eu-west-3.amazonaws.com"},
            b"data-1.s3.dualstack.eu-west-3.amazonaws.com",
            b"",
        ),
        ("Old_Name", {}, b"s3.eu-west-3.amazonaws.com", b"/Old_Name"),
    ],
)
def test_a_bucket_stands_in_the_host_or_in_the_path(
    bucket: str, settings: dict[str, str], host: bytes, root: bytes
) -> None:
    site = sites.endpoint_of(bucket, region="eu-west-3", **settings)
    assert (site.origin.authority, site.root) == (host, root)


def test_china_has_hosts_of_its_own() -> None:
    site = sites.endpoint_of("data-1", region="cn-north-1")
    assert site.origin.host == "data-1.s3.cn-north-1.amazonaws.com.cn"


@pytest.mark.parametrize(
    ("bucket", "settings", "why"),
    [
        ("b--usw2-az1--x-s3", {}, "directory bucket"),
        ("b.c", {"addressing": "virtual"}, "cannot be part of a host"),
        ("b", {"region": "eu west"}, "not the name of a region"),
        ("b", {"region": "x.evil.com/"}, "not the name of a region"),
    ],
)
def test_invalid_requests_are_rejected(bucket: str, settings: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sites.endpoint_of(bucket, **{"region": "eu-west-3", **settings})


def test_a_region_that_is_reported_must_look_like_one() -> None:
    assert sites.region_from_response({b"x-amz-bucket-region": b"eu-west-3"}, {}) == "eu-west-3"
    assert sites.region_from_response({}, {"Region": "eu-west-3"}) == "eu-west-3"
    assert sites.region_from_response({b"x-amz-bucket-region": b"evil.com/"}, {}) == ""


# --- generations and headers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("", wire.Pin()),
        ("abc-2/17", wire.Pin("abc-2", 17)),
        ("a/b/17", wire.Pin("a/b", 17)),
        ("abc", wire.Pin("abc")),
        ('"abc"', wire.Pin("abc")),
        ("version:a/1", wire.Pin(version="a/1")),
    ],
)
def test_a_generation_is_entity_tag_and_size(text: str, pin: wire.Pin) -> None:
    assert wire.parse_pin(text) == pin


def test_an_entity_tag_alone_matches_what_is_reported_with_its_size() -> None:
    assert wire.is_same_generation("abc", "abc/5")
    assert not wire.is_same_generation("abc/5", "abd/5")
    assert not wire.is_same_generation("", "")
    assert wire.generation_of("", 5) == ""


def test_a_size_that_differs_is_reported() -> None:
    wire.require_size(wire.Pin("a"), 5)
    with pytest.raises(ValueError, match="the object has 5 bytes, not 6"):
        wire.require_size(wire.Pin("a", 6), 5)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"a b": "x"}, "cannot have the name"),
        ({"a": "ü"}, "cannot have the value"),
        ({"a": "x\ny"}, "cannot have the value"),
        ({"a": " x"}, "cannot have the value"),
        ({"a": "x" * 2048}, "at most 2048"),
    ],
)
def test_metadata_that_no_header_takes_is_refused(metadata: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wire.object_headers(ObjectAttributes(metadata=metadata))


def test_metadata_comes_back_from_headers() -> None:
    sent = {
        name.lower(): value
        for name, value in wire.object_headers(
            ObjectAttributes(content_type="t/t", metadata={"Label": "x y"})
        )
    }
    told = {
        **sent,
        **TOLD,
        b"content-encoding": b"aws-chunked,gzip",
        b"x-amz-storage-class": b"GLACIER",
        b"last-modified": b"Sun, 22 Nov 2026 06:43:05 GMT",
    }
    meta = wire.meta_from_headers(told, key="k", uri="s3://b/k", size=5, crc32c=None)
    assert (meta.content_type, meta.content_encoding) == ("t/t", "gzip")
    assert (dict(meta.metadata), meta.storage_class) == ({"label": "x y"}, "GLACIER")
    assert meta.updated is not None
    assert meta.updated.isoformat() == "2026-11-22T06:43:05+00:00"


def test_the_source_of_a_copy_is_encoded_and_pinned() -> None:
    assert dict(copy_headers("b", "a b/ü", PIN)) == {
        b"x-amz-copy-source": b"/b/a%20b/%C3%BC",
        b"x-amz-copy-source-if-match": f'"{ETAG}"'.encode(),
    }
    [(_, source)] = copy_headers("b", "a", wire.Pin(version="v/1"))
    assert source == b"/b/a?versionId=v%2F1"


def test_no_condition_is_no_header() -> None:
    assert wire.precondition_headers(Precondition()) == []
    assert wire.upload_headers(has_checksums=False) == []
    assert wire.hash_headers(None) == []


@given(name=names)
def test_a_name_is_deleted_by_the_name_it_has(name: str) -> None:
    """What XML cannot hold is not written into it."""
    if not fits_xml(name):
        return
    import xml.etree.ElementTree as ET

    root = ET.fromstring(delete_body([(name, PIN)]))
    assert [each.text for each in root.iter("Key")] == [name]


def test_parts_of_a_copy_are_all_of_it() -> None:
    assert plan_copy(10, 4) == [(0, 4), (4, 8), (8, 10)]


# --- reads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers", "num_bytes", "start", "end", "why"),
    [
        (200, {}, 5, 0, None, "no ETag"),
        (200, TOLD, 5, 1, None, "ignored the range"),
        (200, TOLD, 5, 0, 4, "ignored the range"),
        (204, TOLD, 0, 0, 4, "is not a response to a read"),
        (206, TOLD, 2, 0, 4, "is not one range"),
        (206, {**TOLD, b"content-range": b"bytes 1-2/5"}, 2, 0, 4, "is not the range from byte"),
        (206, {**TOLD, b"content-range": b"bytes 0-2/5"}, 2, 0, 4, "is not the range from byte"),
        (206, {**TOLD, b"content-range": b"bytes 0-4/5"}, 5, 0, 4, "is longer than the requested"),
        (206, {**TOLD, b"content-range": b"bytes 0-3/9"}, 4, 0, 4, "the object has 9 bytes now"),
    ],
)
def test_an_answer_that_is_another_is_refused(
    status: int, headers: dict[bytes, bytes], num_bytes: int, start: int, end: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        wire.object_size(
            ReadRequest("a", f"{ETAG}/5", start, end),
            response(status, headers, num_bytes),
            wire.etag_of(headers),
        )


@pytest.mark.parametrize(
    ("start", "end", "pin", "expected"),
    [
        (0, None, wire.Pin(), b""),
        (0, 5, PIN, b""),
        (0, 9, PIN, b""),
        (0, 4, PIN, b"bytes=0-3"),
        (0, 5, wire.Pin(ETAG), b"bytes=0-4"),
        (1, 5, PIN, b"bytes=1-4"),
        (1, None, PIN, b"bytes=1-"),
    ],
)
def test_the_whole_is_requested_without_a_range(
    start: int, end: int | None, pin: wire.Pin, expected: bytes
) -> None:
    assert wire.byte_range(start, end, pin) == expected


def test_a_size_past_the_end_must_be_possible() -> None:
    size = wire.size_past_the_end
    assert size({b"content-range": b"bytes */5"}, b"", start=5) == 5
    assert size({b"content-range": b"bytes */5"}, b"", start=4) is None
    assert size({}, b"", start=4) is None


def test_the_head_of_a_broken_body_reports_its_generation() -> None:
    part = {**TOLD, b"content-range": b"bytes 2-4/5"}
    assert wire.generation_from_head(part) == f"{ETAG}/5"
    assert wire.generation_from_head({**TOLD, b"content-length": b"5"}) == f"{ETAG}/5"
    assert wire.generation_from_head(TOLD) == ""


def test_a_crc64nvme_is_compared_where_awscrt_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {**TOLD, b"x-amz-checksum-crc64nvme": b"AAAAAAAAAAc="}
    monkeypatch.setitem(sys.modules, "awscrt", SimpleNamespace())
    module = SimpleNamespace(crc64nvme=lambda data: 7 if data == b"hello" else 8)
    monkeypatch.setitem(sys.modules, "awscrt.checksums", module)
    assert wire.is_same_content(headers, b"hello", uses_md5=False) is True
    assert wire.is_same_content(headers, b"hellO", uses_md5=False) is False
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    assert wire.is_same_content(headers, b"hello", uses_md5=False) is None
    assert wire.is_same_content(headers, b"hellO", uses_md5=True) is False


@pytest.mark.parametrize(
    "headers",
    [
        {b"x-amz-server-side-encryption": b"aws:kms"},
        {b"x-amz-server-side-encryption-customer-algorithm": b"AES256"},
        {b"etag": b'"x-2"'},
    ],
)
def test_an_entity_tag_is_not_always_an_md5(headers: dict[bytes, bytes]) -> None:
    assert wire.has_md5({**TOLD, b"x-amz-server-side-encryption": b"AES256"})
    assert not wire.has_md5({**TOLD, **headers})


@pytest.mark.parametrize("name", [".", "..", "", "\u00e9" * 513, "a" * 1025, "\ud800"])
def test_names_that_no_object_can_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid object name|surrogates not allowed"):
        wire.quote_name(name)


# --- listings ----------------------------------------------------------------------------------


@given(wanted=names, other=names)
@example(wanted="\ue000", other="\ud7ff")
@example(wanted="\x00", other="a")
@example(wanted="k" * 1024, other="j")
def test_all_keys_from_one_on_come_after_what_is_sent(wanted: str, other: str) -> None:
    sent = listing.start_after(wanted)
    assert sent < wanted
    assert len(sent.encode()) <= 1024
    if other >= wanted:
        assert other > sent


@given(wanted=names)
@example(wanted="a ")
@example(wanted="a!")
@example(wanted="a\U00010000")
def test_what_a_listing_starts_after_can_be_reported_in_xml(wanted: str) -> None:
    """Some servers repeat it as it is."""
    if fits_xml(wanted):
        assert fits_xml(listing.start_after(wanted))


def test_a_listing_from_the_beginning_starts_after_nothing() -> None:
    assert listing.start_after("") == ""


def page_xml(rows: list[tuple[str, int]], *, owner: str = "", quoted: str = "&quot;") -> str:
    objects = "".join(
        f"<Contents><Key>{escape(quote(name, safe='/'))}</Key>"
        f"<LastModified>2026-01-02T03:04:05.678Z</LastModified>"
        f"<ETag>{quoted}{ETAG}{quoted}</ETag><ChecksumAlgorithm>CRC32C</ChecksumAlgorithm>"
        f"<ChecksumType>FULL_OBJECT</ChecksumType><Size>{size}</Size>{owner}"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for name, size in rows
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>b</Name><EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>{objects}"
        "</ListBucketResult>"
    )


@pytest.mark.parametrize(
    "form",
    [{}, {"owner": "<Owner><ID>x</ID></Owner>"}, {"quoted": '"'}, {"owner": "<New>x</New>"}],
    ids=["aws", "owner", "plain quotes", "another form"],
)
@given(
    rows=st.lists(st.tuples(names, st.integers(0, 2**40)), max_size=5, unique_by=lambda row: row[0])
)
@settings(max_examples=settings().max_examples // 4)  # of each form
def test_a_page_is_read_in_any_form(form: dict[str, str], rows: list[tuple[str, int]]) -> None:
    page = listing.decode_page(page_xml(rows, **form).encode())
    assert list(zip(page.names, page.sizes, strict=True)) == rows
    assert page.etags == [ETAG] * len(rows)


def page_of(objects: str = "", *, is_truncated: str = "false", count: str = "") -> bytes:
    fields = f"<IsTruncated>{is_truncated}</IsTruncated>" if is_truncated else ""
    fields += f"<KeyCount>{count}</KeyCount>" if count else ""
    return f"<ListBucketResult>{fields}{objects}</ListBucketResult>".encode()


def object_xml(name: str, size: int = 5) -> str:
    return (
        f"<Contents><Key>{name}</Key><LastModified>2026-01-02T03:04:05Z</LastModified>"
        f"<ETag>x</ETag><Size>{size}</Size></Contents>"
    )


TWO = object_xml("a") + object_xml("b")
PREFIXES = "<CommonPrefixes><Prefix>p/</Prefix><Prefix>q/</Prefix></CommonPrefixes>"


@pytest.mark.parametrize(
    "page",
    [
        page_of(object_xml("a") + object_xml("a")),
        page_of(object_xml("a", -5)),
        page_of(object_xml("a", 10**30)),
        page_of(TWO, count="3"),
        page_of(TWO, count="x"),
        page_of(count="-0"),
        page_of(TWO, is_truncated=""),
        page_of(TWO, is_truncated="maybe"),
        page_of(TWO, is_truncated="true"),
        page_of(TWO).replace(b"ListBucketResult", b"Result"),
        page_of(TWO)[:-10],
        page_of("".join(object_xml(f"{number:06}") for number in range(100_001))),
        page_of("<CommonPrefixes><Prefix>a</Prefix></CommonPrefixes>" * 100_001),
    ],
    ids=[
        "key twice",
        "negative size",
        "size of 30 digits",
        "wrong count",
        "count that is no number",
        "count of minus zero",
        "no IsTruncated",
        "IsTruncated of no value",
        "truncated without a token",
        "another root",
        "truncated document",
        "too many objects",
        "too many prefixes",
    ],
)
def test_a_page_that_contradicts_itself_is_malformed(page: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        listing.decode_page(page)


@pytest.mark.parametrize("count", ["", "2", "4"], ids=["none", "without prefixes", "with prefixes"])
def test_a_count_of_keys_may_be_missing_or_without_the_prefixes(count: str) -> None:
    page = listing.decode_page(page_of(TWO + PREFIXES, count=count))
    assert (page.names, page.prefixes, page.next_token) == (["a", "b"], ["p/", "q/"], "")


def test_a_server_may_ignore_the_size_of_a_page() -> None:
    """Such as one that returns 100,000 objects where 1,000 were requested."""
    rows = "".join(object_xml(f"{number:06}") for number in range(100_000))
    assert len(listing.decode_page(page_of(rows, count="100000")).names) == 100_000


def test_objects_of_several_classes_and_times() -> None:
    page = listing.BucketPage(
        names=["p/a", "p/b"],
        sizes=[1, 2],
        etags=["x", "y"],
        updated=["2026-01-02T03:04:05Z", ""],
        classes=["STANDARD", "GLACIER"],
    )
    first, second = listing.listing_of(page, prefix="p/", root="s3://b/p/")
    assert (first.storage_class, second.storage_class) == ("STANDARD", "GLACIER")
    assert first.updated is not None
    assert second.updated is None
    assert (first.uri, second.generation) == ("s3://b/p/a", "y/2")


# --- refusals ----------------------------------------------------------------------------------


def test_an_error_without_a_code_leaves_open_what_was_done() -> None:
    error = error_in_success({}, action="copy", uri="s3://b/k")
    assert getattr(error, "maybe_done", False)
    assert "copy s3://b/k" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("PreconditionFailed", PreconditionFailedError),
        ("AccessDenied", PermissionDeniedError),
        ("NoSuchKey", NotFoundError),
    ],
)
def test_an_error_in_a_success_is_what_it_is_elsewhere(code: str, kind: type[Exception]) -> None:
    """A completion may fail by its condition when its answer has begun."""
    error = error_in_success({"Code": code, "Message": "m"}, action="complete", uri="s3://b/k")
    assert isinstance(error, kind)


def test_a_token_that_is_none_is_reported_as_one() -> None:
    error = service_error(Failure(400, action="read", uri="s3://b/k", code="InvalidToken"))
    assert isinstance(error, PermissionDeniedError)
    assert "session token" in str(error)


def test_an_unknown_code_is_an_error_of_its_object() -> None:
    error = deletion_error("Strange", "so it is", uri="s3://b/k")
    assert error.uri == "s3://b/k"
    assert "Strange" in str(error)


def test_a_body_that_was_damaged_on_its_way_is_a_wrong_checksum() -> None:
    error = service_error(
        Failure(400, action="write", uri="s3://b/k", code="XAmzContentSHA256Mismatch")
    )
    assert isinstance(error, ChecksumError)


def test_buckets_of_an_account() -> None:
    rows = "<Buckets><Bucket><Name>b</Name></Bucket></Buckets>"
    page = f"<ListAllMyBucketsResult>{rows}</ListAllMyBucketsResult>"
    assert listing.decode_buckets(page.encode()) == ["b"]
    with pytest.raises(ValueError, match="<Other>"):
        listing.decode_buckets(b"<Other/>")
    account = sites.endpoint_of("", region="eu-west-1", addressing="virtual")
    assert (account.origin.host, account.root) == ("s3.eu-west-1.amazonaws.com", b"")
