"""Objects of the XML API, by raw requests."""

from __future__ import annotations

import base64
import gzip
import hashlib
import socket
import xml.etree.ElementTree as ET
from email.utils import formatdate
from typing import TYPE_CHECKING

import google_crc32c
import pytest

from aioflux.testing.gcs_server._records import Attributes

if TYPE_CHECKING:
    from tests.gcs_server.conftest import Received

DATA = bytes(range(100))
PLAIN = b"text " * 1000
ZIPPED = gzip.compress(PLAIN)
XML = "/bucket/key"
JSON = "/storage/v1/b/bucket/o/key?alt=media"


def code(response: Received) -> tuple[int, str | None]:
    return response.status, ET.fromstring(response.body).findtext("Code")


def base64_crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def base64_md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


# --- headers ------------------------------------------------------------------------------


def test_a_read_reports_all_that_gcs_reports(call):
    """GET and HEAD name generation, checksums, attributes and how the object is stored."""
    put = call(
        "PUT",
        XML,
        DATA,
        Content_Type="x/y",
        Cache_Control="no-store",
        Content_Language="de",
        Content_Disposition="inline",
        x_goog_meta_colour="red",
        x_goog_storage_class="NEARLINE",
    )
    expected = {
        "x-goog-generation": put.headers["x-goog-generation"],
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": "100",
        "x-goog-stored-content-encoding": "identity",
        "x-goog-storage-class": "NEARLINE",
        "ETag": f'"{hashlib.md5(DATA).hexdigest()}"',
        "Content-Type": "x/y",
        "Content-Length": "100",
        "Cache-Control": "no-store",
        "Content-Language": "de",
        "Content-Disposition": "inline",
        "x-goog-meta-colour": "red",
        "Accept-Ranges": "bytes",
    }
    hashes = [f"crc32c={base64_crc32c(DATA)}", f"md5={base64_md5(DATA)}"]
    assert put.headers["ETag"] == expected["ETag"]
    assert put.headers.get_all("x-goog-hash") == hashes
    for method in ("GET", "HEAD"):
        response = call(method, XML)
        assert {name: response.headers[name] for name in expected} == expected
        assert response.headers.get_all("x-goog-hash") == hashes
        assert "Last-Modified" in response.headers


@pytest.mark.parametrize(
    ("header", "status", "start", "end"),
    [
        ("bytes=0-9", 206, 0, 10),
        ("bytes=90-", 206, 90, 100),
        ("bytes=-5", 206, 95, 100),
        ("bytes=-500", 206, 0, 100),
        ("bytes=95-500", 206, 95, 100),
        ("bytes=99-99", 206, 99, 100),
        ("bytes=9-0", 200, 0, 100),
        ("bytes=0-1,5-6", 200, 0, 100),
        ("lines=0-1", 200, 0, 100),
        ("bytes=-", 200, 0, 100),
    ],
)
def test_a_range_is_clipped_or_ignored(server, call, header, status, start, end):
    """A range of the object is 206; one that HTTP ignores returns the whole."""
    server.put("bucket", "key", DATA)
    response = call("GET", XML, Range=header)
    assert (response.status, response.body) == (status, DATA[start:end])
    content_range = f"bytes {start}-{end - 1}/100" if status == 206 else None
    assert response.headers["Content-Range"] == content_range


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=200-300", "bytes=-0"])
def test_a_range_beyond_the_object_is_416(server, call, header):
    """Content-Range has the size."""
    server.put("bucket", "key", DATA)
    response = call("GET", XML, Range=header)
    assert code(response) == (416, "InvalidRange")
    assert response.headers["Content-Range"] == "bytes */100"


# --- writes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"x_goog_hash": f"crc32c={base64_crc32c(DATA)}"},
        {"x_goog_hash": f"crc32c={base64_crc32c(DATA)},md5={base64_md5(DATA)}"},
        {"Content_MD5": base64_md5(DATA)},
    ],
    ids=["crc32c", "both", "Content-MD5"],
)
def test_a_declared_checksum_that_fits_is_accepted(call, headers):
    """The object is stored."""
    assert call("PUT", XML, DATA, **headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x_goog_hash": f"crc32c={base64_crc32c(b'other')}"},
        {"x_goog_hash": f"md5={base64_md5(b'other')}"},
        {"x_goog_hash": f"crc32c={base64_crc32c(DATA)},md5={base64_md5(b'other')}"},
        {"Content_MD5": base64_md5(b"other")},
    ],
    ids=["crc32c", "md5", "one of both", "Content-MD5"],
)
def test_a_declared_checksum_that_differs_is_bad_digest(server, call, headers):
    """Nothing is stored, and what was there stays."""
    server.put("bucket", "key", b"old")
    assert code(call("PUT", XML, DATA, **headers)) == (400, "BadDigest")
    assert server.get("bucket", "key") == b"old"


def test_an_empty_body_is_an_object(server, call):
    """Zero bytes are stored, and a range of them is 416."""
    assert call("PUT", XML, b"").status == 200
    assert call("GET", XML).body == b""
    assert code(call("GET", XML, Range="bytes=0-")) == (416, "InvalidRange")


def test_a_body_without_length_is_stored(server):
    """Transfer-Encoding: chunked has no announced size."""
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        sock.sendall(
            b"PUT /bucket/key HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"4\r\nab\r\n\r\n3\r\ncde\r\n0\r\n\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.get("bucket", "key") == b"ab\r\ncde"


def test_zero_as_generation_means_absent(server, call):
    """x-goog-if-generation-match: 0 creates, and does not replace."""
    assert call("PUT", XML, b"1", x_goog_if_generation_match="0").status == 200
    response = call("PUT", XML, b"2", x_goog_if_generation_match="0")
    assert code(response) == (412, "PreconditionFailed")
    assert server.get("bucket", "key") == b"1"


@pytest.mark.parametrize("name", ["x_goog_if_generation_match", "x_goog_if_metageneration_match"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_preconditions_hold_for_every_method(server, call, method, name):
    """A number that differs is 412 and changes nothing; the one that fits is accepted."""
    server.put("bucket", "key", b"old")
    head = call("HEAD", XML).headers
    number = head[name.replace("_", "-").replace("if-", "").replace("-match", "")]
    body = b"new" if method == "PUT" else None
    assert call(method, XML, body, **{name: "12345"}).status == 412
    assert server.get("bucket", "key") == b"old"
    assert call(method, XML, body, **{name: number}).status in (200, 204)


def test_a_generation_that_is_gone_is_404(server, call):
    """?generation= names the live generation or nothing, on GET, HEAD and DELETE."""
    old = server.put("bucket", "key", b"old")
    new = server.put("bucket", "key", b"new")
    for method in ("GET", "HEAD", "DELETE"):
        assert call(method, f"{XML}?generation={old}").status == 404
    assert call("GET", f"{XML}?generation={new}").body == b"new"
    assert call("DELETE", f"{XML}?generation={new}").status == 204
    assert code(call("DELETE", XML)) == (404, "NoSuchKey")


# --- conditional reads --------------------------------------------------------------------


@pytest.mark.parametrize("target", [XML, JSON], ids=["xml", "json"])
def test_conditions_on_the_etag(server, call, target):
    """If-Match and If-None-Match take lists and the star."""
    server.put("bucket", "key", DATA)
    etag = call("GET", target).headers["ETag"]
    assert call("GET", target, If_Match=f'"x", {etag}').status == 200
    assert call("GET", target, If_Match="*").status == 200
    assert call("GET", target, If_Match='"x"').status == 412
    assert call("GET", target, If_None_Match='"x"').status == 200
    response = call("GET", target, If_None_Match=f'"x", {etag}')
    assert (response.status, response.body) == (304, b"")
    assert call("GET", target, If_None_Match="*").status == 304


def test_conditions_on_the_date(server, call):
    """A date before the last change sends the bytes, one after it does not; nonsense is ignored."""
    server.put("bucket", "key", DATA)
    updated = server.state.get("bucket", "key").updated_us / 1e6
    before, later = (formatdate(updated + delta, usegmt=True) for delta in (-60, 60))
    assert call("GET", XML, If_Modified_Since=before).status == 200
    assert call("GET", XML, If_Modified_Since=later).status == 304
    assert call("GET", XML, If_Modified_Since="nonsense").status == 200
    assert call("GET", XML, If_Unmodified_Since=before).status == 412
    assert call("GET", XML, If_Unmodified_Since=later).status == 200


# --- transcoding --------------------------------------------------------------------------


@pytest.mark.parametrize("target", [XML, JSON], ids=["xml", "json"])
@pytest.mark.parametrize(
    ("cache_control", "accept", "is_plain"),
    [
        (None, None, True),
        (None, "identity", True),
        (None, "br, gzip;q=0.5", False),
        ("no-transform", None, False),
        ("public, no-transform", None, False),
        ("public", None, True),
    ],
)
def test_gzip_objects_are_decompressed(server, call, target, cache_control, accept, is_plain):
    """Unless the caller accepts gzip or the object says no-transform."""
    attributes = Attributes(content_encoding="gzip", cache_control=cache_control)
    server.state.put("bucket", "key", [ZIPPED], attributes)
    response = call("GET", target, **({"Accept_Encoding": accept} if accept else {}))
    assert response.status == 200
    assert response.body == (PLAIN if is_plain else ZIPPED)
    assert response.headers["Content-Encoding"] == (None if is_plain else "gzip")
    assert response.headers["x-goog-stored-content-encoding"] == "gzip"
    assert response.headers["x-goog-stored-content-length"] == str(len(ZIPPED))
    assert f"crc32c={base64_crc32c(ZIPPED)}" in response.headers.get_all("x-goog-hash")


def test_a_range_of_a_decompressed_object_is_ignored(server, call):
    """The whole is sent with 200; of the compressed object the range is."""
    server.state.put("bucket", "key", [ZIPPED], Attributes(content_encoding="gzip"))
    response = call("GET", XML, Range="bytes=0-9")
    assert (response.status, response.body) == (200, PLAIN)
    response = call("GET", XML, Range="bytes=0-9", Accept_Encoding="gzip")
    assert (response.status, response.body) == (206, ZIPPED[:10])


def test_bytes_that_are_no_gzip_are_served_as_they_are(server, call):
    """A wrong Content-Encoding does not make an object unreadable."""
    server.state.put("bucket", "key", [DATA], Attributes(content_encoding="gzip"))
    assert call("GET", XML).body == DATA


# --- copies -------------------------------------------------------------------------------


def test_a_copy_has_bytes_and_attributes_of_its_source(server, call):
    """Source names are percent-encoded, with or without a leading slash."""
    attributes = Attributes(content_type="x/y", metadata={"colour": "red"})
    server.state.put("bucket", "a/%2F ü", [DATA], attributes)
    for source in ("/bucket/a/%252F%20%C3%BC", "bucket%2Fa%2F%252F%20%C3%BC"):
        response = call("PUT", XML, b"", x_goog_copy_source=source)
        assert response.status == 200
        assert ET.fromstring(response.body).tag.endswith("}CopyObjectResult")
        record = server.state.get("bucket", "key")
        assert server.get("bucket", "key") == DATA
        assert record.attributes == attributes
        assert response.headers["x-goog-generation"] == str(record.generation)


def test_a_copy_may_have_attributes_of_its_own(server, call):
    """x-goog-metadata-directive: REPLACE takes those of the request."""
    server.state.put("bucket", "a", [DATA], Attributes(metadata={"colour": "red"}))
    headers = {"x_goog_copy_source": "/bucket/a", "x_goog_metadata_directive": "REPLACE"}
    assert call("PUT", XML, b"", **headers, x_goog_meta_size="big").status == 200
    assert server.state.get("bucket", "key").attributes.metadata == {"size": "big"}


def test_a_copy_of_a_generation(server, call):
    """x-goog-copy-source-generation names the live one or nothing."""
    old = server.put("bucket", "a", b"old")
    new = server.put("bucket", "a", b"new")
    headers = {"x_goog_copy_source": "/bucket/a"}
    gone = call("PUT", XML, b"", **headers, x_goog_copy_source_generation=str(old))
    assert code(gone) == (404, "NoSuchKey")
    assert call("PUT", XML, b"", **headers, x_goog_copy_source_generation=str(new)).status == 200


@pytest.mark.parametrize(
    "condition",
    [
        {"x_goog_copy_source_if_generation_match": "1"},
        {"x_goog_copy_source_if_metageneration_match": "7"},
        {"x_goog_copy_source_if_match": '"x"'},
        {"x_goog_copy_source_if_none_match": "*"},
        {"x_goog_if_generation_match": "1"},
    ],
    ids=lambda condition: next(iter(condition)),
)
def test_a_copy_whose_precondition_fails_is_412(server, call, condition):
    """Those of the source and of the target are judged; nothing is written."""
    server.put("bucket", "a", DATA)
    response = call("PUT", XML, b"", x_goog_copy_source="/bucket/a", **condition)
    assert code(response) == (412, "PreconditionFailed")
    assert server.keys("bucket") == ["a"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("/bucket/none", (404, "NoSuchKey")),
        ("/none/a", (404, "NoSuchBucket")),
        ("bucket", (400, "InvalidArgument")),
    ],
)
def test_a_source_that_does_not_exist(call, source, expected):
    """It is 404, or 400 if it names no object."""
    assert code(call("PUT", XML, b"", x_goog_copy_source=source)) == expected


@pytest.mark.parametrize("name", ["If_Modified_Since", "If_Unmodified_Since"])
@pytest.mark.parametrize("year", ["99999999999", "9" * 5000])
def test_a_date_that_there_is_not_asks_nothing(server, call, name, year):
    """An invalid date is ignored (RFC 9110, section 13.1.3)."""
    server.put("bucket", "key", DATA)
    date = f"Mon, 01 Jan {year} 00:00:00 GMT"
    assert call("GET", XML, **{name: date}).status == 200
    assert call("GET", XML, **{name: f"Mon, 01 Jan {year}"}).status == 200
