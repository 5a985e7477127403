"""Buckets and listings of the XML API, by raw requests."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from tests.gcs_server.conftest import Call, Received

NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


def code(response: Received) -> tuple[int, str | None]:
    return response.status, ET.fromstring(response.body).findtext("Code")


def field(response: Received, name: str) -> str | None:
    assert response.status == 200, response.body
    return ET.fromstring(response.body).findtext(NAMESPACE + name)


def column(response: Received, row: str, name: str) -> list[str | None]:
    assert response.status == 200, response.body
    rows = ET.fromstring(response.body).iter(NAMESPACE + row)
    return [element.findtext(NAMESPACE + name) for element in rows]


def entries(response: Received) -> list[str | None]:
    return column(response, "Contents", "Key") + column(response, "CommonPrefixes", "Prefix")


@pytest.fixture
def filled(server):
    for key in ["a", "b/1", "b/2", "c", "d/1", "e"]:
        server.put("bucket", key, b"data")
    return server


# --- buckets ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/new", "/new/"])
def test_a_bucket_comes_and_goes(call, target):
    """PUT makes, HEAD finds, DELETE removes it, with and without the slash."""
    assert call("HEAD", target).status == 404
    assert call("PUT", target).status == 200
    assert call("HEAD", target).status == 200
    assert code(call("PUT", target)) == (409, "BucketAlreadyOwnedByYou")
    assert call("DELETE", target).status == 204
    assert code(call("DELETE", target)) == (404, "NoSuchBucket")


def test_a_bucket_with_objects_stays(filled, call):
    """DELETE is 409 BucketNotEmpty."""
    assert code(call("DELETE", "/bucket")) == (409, "BucketNotEmpty")


def test_a_bucket_is_where_its_maker_said(call):
    """LocationConstraint is kept, and US by default."""
    inner = b"<LocationConstraint>EU</LocationConstraint>"
    call("PUT", "/new", b"<CreateBucketConfiguration>%s</CreateBucketConfiguration>" % inner)
    for bucket, location in [("new", "EU"), ("bucket", "US")]:
        assert ET.fromstring(call("GET", f"/{bucket}?location").body).text == location


def test_versioning_is_off_and_stays_off(call):
    """The status is empty; a PUT is rejected, not ignored."""
    assert field(call("GET", "/bucket?versioning"), "Status") is None
    assert code(call("PUT", "/bucket?versioning", b"<x/>")) == (501, "NotImplemented")


def test_the_root_lists_buckets(server, call):
    """GET / is the list of all buckets."""
    server.create_bucket("another")
    assert column(call("GET", "/"), "Bucket", "Name") == ["another", "bucket"]


# --- objects ------------------------------------------------------------------------------


def test_a_row_reports_what_a_head_reports(filled, call):
    """Size, generation, metageneration, ETag and storage class agree."""
    head, listing = call("HEAD", "/bucket/a").headers, call("GET", "/bucket?prefix=a")
    pairs = {
        "Generation": "x-goog-generation",
        "MetaGeneration": "x-goog-metageneration",
        "Size": "Content-Length",
        "ETag": "ETag",
        "StorageClass": "x-goog-storage-class",
    }
    for name, header in pairs.items():
        assert column(listing, "Contents", name) == [head[header]]


def test_version_1_goes_on_from_a_marker(filled, call):
    """NextMarker is there while more follows; names and prefixes count alike."""
    found, marker = [], ""
    while True:
        response = call("GET", f"/bucket?delimiter=/&max-keys=2&marker={quote(marker)}")
        found.append(entries(response))
        if field(response, "IsTruncated") == "false":
            break
        marker = field(response, "NextMarker") or pytest.fail("no NextMarker")
    assert found == [["a", "b/"], ["c", "d/"], ["e"]]
    assert field(response, "NextMarker") is None


def test_version_2_goes_on_from_a_token(filled, call):
    """NextContinuationToken leads through; KeyCount counts names and prefixes."""
    found, token = [], ""
    while True:
        query = f"list-type=2&delimiter=/&max-keys=2{token}"
        response = call("GET", f"/bucket/?{query}")
        found.append(entries(response))
        assert field(response, "KeyCount") == str(len(found[-1]))
        following = field(response, "NextContinuationToken")
        assert (following is None) == (field(response, "IsTruncated") == "false")
        if following is None:
            break
        token = f"&continuation-token={quote(following)}"
    assert found == [["a", "b/"], ["c", "d/"], ["e"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("marker=b/1", ["b/2", "c", "d/1", "e"]),
        ("list-type=2&start-after=b/1", ["b/2", "c", "d/1", "e"]),
        ("list-type=2&start-after=b/1&delimiter=/", ["c", "e", "b/", "d/"]),
        ("prefix=b", ["b/1", "b/2"]),
        ("prefix=b/&delimiter=/", ["b/1", "b/2"]),
        ("prefix=b&delimiter=/", ["b/"]),
        ("delimiter=/1", ["a", "b/2", "c", "e", "b/1", "d/1"]),
        ("prefix=zzz", []),
        ("max-keys=0", []),
    ],
)
def test_what_a_query_lists(filled, call, query, expected):
    """Markers are exclusive, a delimiter may be long, and prefixes come after names."""
    assert entries(call("GET", f"/bucket?{query}")) == expected


def test_a_page_has_a_thousand_rows_at_most(server, call):
    """max-keys above that is cut."""
    for number in range(1001):
        server.put("bucket", f"{number:04}", b"")
    response = call("GET", "/bucket?max-keys=5000")
    assert len(entries(response)) == 1000
    assert field(response, "MaxKeys") == "1000"
    assert field(response, "IsTruncated") == "true"


def test_names_are_encoded_on_demand(server, call):
    """encoding-type=url percent-encodes names, so that any name fits into XML."""
    for key in ["a b/ü\x01&", "<x>"]:
        server.put("bucket", key, b"")
    encoded = entries(call("GET", "/bucket?encoding-type=url"))
    assert encoded == ["%3Cx%3E", "a%20b/%C3%BC%01%26"]
    server.state.delete("bucket", "a b/ü\x01&")
    assert entries(call("GET", "/bucket")) == ["<x>"]


def test_owners_are_named_on_demand_in_version_2(filled, call):
    """fetch-owner=true adds them."""
    assert column(call("GET", "/bucket?list-type=2"), "Owner", "ID") == []
    assert len(column(call("GET", "/bucket?list-type=2&fetch-owner=true"), "Owner", "ID")) == 6


@pytest.mark.parametrize(
    "query",
    ["max-keys=x", "max-keys=-1", "encoding-type=rot13", "list-type=2&continuation-token=%ff"],
)
def test_a_query_without_sense_is_400(call, query):
    """It is InvalidArgument."""
    assert code(call("GET", f"/bucket?{query}")) == (400, "InvalidArgument")


def test_a_bucket_that_does_not_exist_is_404(call):
    """Every listing says NoSuchBucket."""
    for query in ["", "?list-type=2", "?uploads", "?location", "?versioning"]:
        assert code(call("GET", f"/none{query}")) == (404, "NoSuchBucket")


# --- open uploads -------------------------------------------------------------------------


def begin(call: Call, key: str) -> str:
    return field(call("POST", f"/bucket/{key}?uploads", b""), "UploadId") or pytest.fail("no id")


def test_open_uploads_are_listed_by_key_and_age(call):
    """Prefix and delimiter work as for objects."""
    ids = [begin(call, key) for key in ["b/1", "a", "b/2", "a"]]
    response = call("GET", "/bucket?uploads")
    assert column(response, "Upload", "UploadId") == [ids[1], ids[3], ids[0], ids[2]]
    assert column(response, "Upload", "Key") == ["a", "a", "b/1", "b/2"]
    response = call("GET", "/bucket?uploads&delimiter=/")
    assert column(response, "Upload", "Key") == ["a", "a"]
    assert column(response, "CommonPrefixes", "Prefix") == ["b/"]
    response = call("GET", "/bucket?uploads&prefix=b/")
    assert column(response, "Upload", "Key") == ["b/1", "b/2"]


def test_open_uploads_come_in_pages(call):
    """Both markers lead from page to page, through several uploads of one key."""
    ids = [begin(call, key) for key in ["a", "a", "a", "b", "c"]]
    found, markers = [], ""
    while True:
        response = call("GET", f"/bucket?uploads&max-uploads=2{markers}")
        found.append(column(response, "Upload", "UploadId"))
        if field(response, "IsTruncated") == "false":
            break
        key, upload_id = field(response, "NextKeyMarker"), field(response, "NextUploadIdMarker")
        markers = f"&key-marker={key}&upload-id-marker={upload_id}"
    assert found == [ids[:2], ids[2:4], ids[4:]]


def test_a_bucket_takes_its_open_uploads_along(server, call):
    """They do not keep it from being deleted, and are gone when it is made again."""
    upload_id = begin(call, "key")
    assert call("DELETE", "/bucket").status == 204
    server.create_bucket("bucket")
    response = call("PUT", f"/bucket/key?partNumber=1&uploadId={upload_id}", b"x")
    assert code(response) == (404, "NoSuchUpload")


@pytest.mark.parametrize("name", ["A!", "ab", "UPPER", "a..b", "-abc", "x" * 64])
def test_a_name_that_no_bucket_has_is_400(server, call, name):
    """The XML API knows the rules for names, too."""
    response = call("PUT", f"/{name}")
    assert response.status == 400
    assert b"<Code>InvalidBucketName</Code>" in response.body
    assert list(server.state.buckets) == ["bucket"]


@pytest.mark.parametrize("query", ["max-keys=0", "list-type=2&max-keys=0", "uploads&max-uploads=0"])
def test_a_page_of_nothing_is_the_last(server, call, query):
    """Whoever asks for none is not sent on for more of them."""
    server.put("bucket", "key", b"data")
    call("POST", "/bucket/key?uploads", b"")
    assert b"<IsTruncated>false</IsTruncated>" in call("GET", f"/bucket?{query}").body
