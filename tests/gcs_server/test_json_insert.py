"""objects.insert in one request: by media and by multipart/related."""

from __future__ import annotations

import base64
import hashlib
import json
import struct

import google_crc32c
import pytest

UPLOAD = "/upload/storage/v1/b/bucket/o"
MEDIA = f"{UPLOAD}?uploadType=media&name=key"
MULTIPART = f"{UPLOAD}?uploadType=multipart"
DATA = b"\r\n--not-the-boundary\r\n\0\xff\r"


def crc32c(data: bytes) -> str:
    return base64.b64encode(struct.pack(">I", google_crc32c.value(data))).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def related(resource: dict, data: bytes, *, end: bytes = b"\r\n", preamble: bytes = b"") -> bytes:
    lines = [
        b"--limit",
        b"Content-Type: application/json; charset=UTF-8",
        b"",
        json.dumps(resource).encode(),
        b"--limit",
        b"Content-Type: text/plain",
        b"",
        data,
        b"--limit--",
    ]
    return preamble + end.join(lines)


def insert(call, resource: dict, data: bytes = DATA, *, query: str = "", **kwargs):
    headers = kwargs.pop("headers", {})
    return call(
        "POST",
        MULTIPART + query,
        related(resource, data, **kwargs),
        Content_Type='multipart/related; boundary="limit"',
        **headers,
    )


def reason(response) -> str:
    return json.loads(response.body)["error"]["errors"][0]["reason"]


@pytest.mark.parametrize("end", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
@pytest.mark.parametrize("preamble", [b"", b"\r\n", b"\n", b"for mail readers\r\n"])
@pytest.mark.parametrize("data", [DATA, b"", b"\n", b"\r", b"--limi", bytes(300_000)])
def test_the_bytes_between_boundaries_arrive_exactly(server, call, end, preamble, data):
    assert insert(call, {"name": "key"}, data, end=end, preamble=preamble).status == 200
    assert server.get("bucket", "key") == data


def test_every_writable_field_of_the_metadata_is_kept(call):
    resource = {
        "name": "key",
        "contentType": "image/png",
        "contentEncoding": "identity",
        "contentDisposition": "inline",
        "contentLanguage": "de",
        "cacheControl": "no-store",
        "customTime": "2026-01-02T03:04:05Z",
        "storageClass": "NEARLINE",
        "metadata": {"colour": "röt"},
    }
    response = json.loads(insert(call, resource).body)
    assert {name: response[name] for name in resource} == resource
    assert json.loads(call("GET", "/storage/v1/b/bucket/o/key").body) == response


def test_the_type_of_the_media_part_counts_where_the_metadata_has_none(call):
    assert json.loads(insert(call, {"name": "key"}).body)["contentType"] == "text/plain"


@pytest.mark.parametrize("field", ["crc32c", "md5Hash"])
def test_a_checksum_in_the_metadata_is_compared(server, call, field):
    right = {"crc32c": crc32c(DATA), "md5Hash": md5(DATA)}
    wrong = {"crc32c": crc32c(b"other"), "md5Hash": md5(b"other")}
    rejected = insert(call, {"name": "key", field: wrong[field]})
    assert (rejected.status, reason(rejected)) == (400, "invalid")
    assert server.keys("bucket") == []
    assert insert(call, {"name": "key", field: right[field]}).status == 200


@pytest.mark.parametrize("kind", ["crc32c", "md5"])
def test_a_checksum_in_the_headers_is_compared(server, call, kind):
    compute = {"crc32c": crc32c, "md5": md5}[kind]
    rejected = call("POST", MEDIA, DATA, X_Goog_Hash=f"{kind}={compute(b'other')}")
    assert (rejected.status, reason(rejected)) == (400, "invalid")
    assert server.keys("bucket") == []
    assert call("POST", MEDIA, DATA, X_Goog_Hash=f"{kind}={compute(DATA)}").status == 200


def test_a_value_that_is_no_checksum_is_400(call):
    assert insert(call, {"name": "key", "crc32c": "?"}).status == 400
    assert insert(call, {"name": "key", "md5Hash": "AAAA"}).status == 400


def test_checksums_that_contradict_each_other_are_400(call):
    headers = {"X_Goog_Hash": f"crc32c={crc32c(b'other')}"}
    assert insert(call, {"name": "key", "crc32c": crc32c(DATA)}, headers=headers).status == 400


def test_the_content_encoding_may_come_by_the_query(call):
    response = call("POST", f"{MEDIA}&contentEncoding=gzip", DATA)
    assert json.loads(response.body)["contentEncoding"] == "gzip"


def test_a_media_upload_has_the_type_of_its_request(call):
    response = call("POST", MEDIA, DATA, Content_Type="x/y")
    assert json.loads(response.body)["contentType"] == "x/y"
    response = call("POST", MEDIA, DATA)
    assert json.loads(response.body)["contentType"] == "application/octet-stream"


def test_an_upload_may_be_empty(server, call):
    response = call("POST", MEDIA, b"")
    assert json.loads(response.body)["size"] == "0"
    assert server.get("bucket", "key") == b""


def test_parameters_that_change_nothing_here_are_accepted(call):
    query = "&predefinedAcl=publicRead&projection=full&userProject=p&kmsKeyName=k"
    assert call("POST", MEDIA + query, DATA).status == 200


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (f"{UPLOAD}?uploadType=media", "required"),
        (f"{UPLOAD}?name=key", "required"),
        (f"{UPLOAD}?uploadType=other&name=key", "invalid"),
    ],
    ids=["no name", "no type", "unknown type"],
)
def test_an_upload_that_says_too_little_is_400(call, target, expected):
    response = call("POST", target, DATA)
    assert (response.status, reason(response)) == (400, expected)


def test_two_names_that_differ_are_400(server, call):
    assert insert(call, {"name": "key"}, query="&name=other").status == 400
    assert insert(call, {"name": "key"}, query="&name=key").status == 200
    assert insert(call, {}, query="&name=third").status == 200
    assert server.keys("bucket") == ["key", "third"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--limit\r\n\r\n{}\r\n--limit--",
        b"--limit\r\n\r\n{}\r\n--limit\r\n\r\ndata",
        b"--limit\r\n\r\n{]\r\n--limit\r\n\r\ndata\r\n--limit--",
        b"--limit\r\n\r\n[]\r\n--limit\r\n\r\ndata\r\n--limit--",
        b'--limit\r\n\r\n{"metadata": {"a": 1}}\r\n--limit\r\n\r\ndata\r\n--limit--',
        b'--limit\r\n\r\n{"contentType": 5}\r\n--limit\r\n\r\ndata\r\n--limit--',
    ],
    ids=["empty", "one part", "no end", "no JSON", "no object", "number in it", "not a text"],
)
def test_a_malformed_body_is_400(server, call, body):
    content_type = "multipart/related; boundary=limit"
    response = call("POST", f"{MULTIPART}&name=key", body, Content_Type=content_type)
    assert response.status == 400
    assert server.keys("bucket") == []


def test_a_multipart_upload_without_a_boundary_is_400(call):
    assert call("POST", f"{MULTIPART}&name=key", b"x", Content_Type="text/plain").status == 400


def test_a_precondition_of_an_upload_is_judged(server, call):
    assert insert(call, {"name": "key"}, query="&ifGenerationMatch=0").status == 200
    again = insert(call, {"name": "key"}, b"other", query="&ifGenerationMatch=0")
    assert (again.status, reason(again)) == (412, "conditionNotMet")
    assert server.get("bucket", "key") == DATA


def test_an_upload_to_no_bucket_is_404(call):
    response = call("POST", "/upload/storage/v1/b/none/o?uploadType=media&name=key", DATA)
    assert (response.status, reason(response)) == (404, "notFound")


@pytest.mark.parametrize("key", ["x" * 1024, "\u732b" * 341, "a/../b", "...", "\t", " ", "%", "?#"])
def test_any_key_that_gcs_allows_works(server, call, key):
    response = insert(call, {"name": key})
    assert json.loads(response.body)["name"] == key
    assert server.keys("bucket") == [key]


@pytest.mark.parametrize("key", ["x" * 1025, "\u732b" * 342, ".", "..", "a\nb", "a\rb"])
def test_a_key_that_gcs_rejects_is_400(server, call, key):
    assert insert(call, {"name": key}).status == 400
    assert server.keys("bucket") == []
