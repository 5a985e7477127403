"""Multipart uploads of the XML API, by raw requests."""

from __future__ import annotations

import base64
import hashlib
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import google_crc32c
import pytest

if TYPE_CHECKING:
    from tests.gcs_server.conftest import Call, Received

NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
MIB = 1024 * 1024
BIG = bytes(5 * MIB)
TARGET = "/bucket/dir/object"


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def text(response: Received, name: str) -> str | None:
    return ET.fromstring(response.body).findtext(f"{NAMESPACE}{name}")


def code(response: Received) -> tuple[int, str | None]:
    return response.status, ET.fromstring(response.body).findtext("Code")


def begin(call: Call, target: str = TARGET, **headers: str) -> str:
    response = call("POST", f"{target}?uploads", b"", **headers)
    assert response.status == 200
    upload_id = text(response, "UploadId")
    assert upload_id
    return upload_id


def put(call: Call, upload_id: str, number: int, data: bytes, **headers: str) -> Received:
    return call("PUT", f"{TARGET}?partNumber={number}&uploadId={upload_id}", data, **headers)


def listing(*parts: tuple[int, str | None], namespace: str = "") -> bytes:
    rows = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
        for number, etag in parts
    )
    return f"<CompleteMultipartUpload{namespace}>{rows}</CompleteMultipartUpload>".encode()


def complete(call: Call, upload_id: str, body: bytes, **headers: str) -> Received:
    return call("POST", f"{TARGET}?uploadId={upload_id}", body, **headers)


def test_an_object_is_its_parts_in_order(server, call):
    """The object appears at complete, with crc32c of the whole, and no MD5."""
    server.put("bucket", "dir/object", b"old")
    upload_id = begin(call, Content_Type="x/y", x_goog_meta_colour="red")
    last = put(call, upload_id, 7, b"tail").headers["ETag"]
    first = put(call, upload_id, 2, BIG).headers["ETag"]
    assert server.get("bucket", "dir/object") == b"old"
    response = complete(call, upload_id, listing((2, first), (7, last)))
    assert response.status == 200
    assert (text(response, "Bucket"), text(response, "Key")) == ("bucket", "dir/object")
    assert response.headers.get_all("x-goog-hash") == [f"crc32c={crc32c(BIG + b'tail')}"]
    got = call("GET", TARGET)
    assert got.body == BIG + b"tail"
    assert got.headers["x-goog-generation"] == response.headers["x-goog-generation"]
    assert got.headers.get_all("x-goog-hash") == response.headers.get_all("x-goog-hash")
    assert got.headers["ETag"] == text(response, "ETag")
    assert (got.headers["Content-Type"], got.headers["x-goog-meta-colour"]) == ("x/y", "red")


def test_completing_twice_is_no_such_upload(call):
    """The id of a completed upload is gone: 404."""
    upload_id = begin(call)
    body = listing((1, put(call, upload_id, 1, b"x").headers["ETag"]))
    assert complete(call, upload_id, body).status == 200
    assert code(complete(call, upload_id, body)) == (404, "NoSuchUpload")


def test_aborting_forgets_the_parts(server, call):
    """204, then 404 for everything that names the upload."""
    upload_id = begin(call)
    put(call, upload_id, 1, b"x")
    assert call("DELETE", f"{TARGET}?uploadId={upload_id}").status == 204
    assert code(call("DELETE", f"{TARGET}?uploadId={upload_id}")) == (404, "NoSuchUpload")
    assert code(put(call, upload_id, 1, b"x")) == (404, "NoSuchUpload")
    assert code(call("GET", f"{TARGET}?uploadId={upload_id}")) == (404, "NoSuchUpload")
    assert server.keys("bucket") == []


def test_an_upload_belongs_to_its_object(call):
    """Its id under another key is no upload."""
    upload_id = begin(call, "/bucket/other")
    assert code(put(call, upload_id, 1, b"x")) == (404, "NoSuchUpload")


def test_a_part_reports_its_checksums(call):
    """ETag is the MD5 in hex, and x-goog-hash has crc32c and MD5."""
    response = put(call, begin(call), 1, b"data")
    assert response.headers["ETag"] == f'"{hashlib.md5(b"data").hexdigest()}"'
    hashes = [f"crc32c={crc32c(b'data')}", f"md5={md5(b'data')}"]
    assert response.headers.get_all("x-goog-hash") == hashes


@pytest.mark.parametrize(
    "headers",
    [
        {"x_goog_hash": f"crc32c={crc32c(b'other')}"},
        {"x_goog_hash": f"md5={md5(b'other')}"},
        {"Content_MD5": md5(b"other")},
    ],
    ids=["crc32c", "md5", "Content-MD5"],
)
def test_a_part_whose_checksum_differs_is_bad_digest(server, call, headers):
    """The part that was there stays."""
    upload_id = begin(call)
    first = put(call, upload_id, 1, b"first").headers["ETag"]
    assert code(put(call, upload_id, 1, b"second", **headers)) == (400, "BadDigest")
    assert complete(call, upload_id, listing((1, first))).status == 200
    assert server.get("bucket", "dir/object") == b"first"


def test_a_part_sent_again_replaces_the_first(server, call):
    """The ETag of the first is then InvalidPart."""
    upload_id = begin(call)
    first = put(call, upload_id, 1, b"first").headers["ETag"]
    second = put(call, upload_id, 1, b"second").headers["ETag"]
    assert code(complete(call, upload_id, listing((1, first)))) == (400, "InvalidPart")
    assert complete(call, upload_id, listing((1, second))).status == 200
    assert server.get("bucket", "dir/object") == b"second"


@pytest.mark.parametrize("number", ["0", "10001", "-1", "x"])
def test_part_numbers_are_1_to_10000(call, number):
    """Others are InvalidArgument."""
    response = call("PUT", f"{TARGET}?partNumber={number}&uploadId={begin(call)}", b"x")
    assert code(response) == (400, "InvalidArgument")


def test_the_last_part_number_is_10000(server, call):
    """It may even be the only one."""
    upload_id = begin(call)
    etag = put(call, upload_id, 10_000, b"x").headers["ETag"]
    assert complete(call, upload_id, listing((10_000, etag))).status == 200


def test_sizes_are_judged_at_complete(server, call):
    """A small part is stored, and is EntityTooSmall only if another follows it."""
    upload_id = begin(call)
    small = put(call, upload_id, 1, BIG[:-1]).headers["ETag"]
    last = put(call, upload_id, 2, b"x").headers["ETag"]
    both = listing((1, small), (2, last))
    assert code(complete(call, upload_id, both)) == (400, "EntityTooSmall")
    assert server.keys("bucket") == []
    assert complete(call, upload_id, listing((1, small))).status == 200


def test_unlisted_parts_are_dropped(server, call):
    """The object has the listed parts only, and the upload is gone with the others."""
    upload_id = begin(call)
    put(call, upload_id, 1, b"left out")
    etag = put(call, upload_id, 2, b"taken").headers["ETag"]
    assert complete(call, upload_id, listing((2, etag))).status == 200
    assert server.get("bucket", "dir/object") == b"taken"
    assert server.state.multipart_uploads == {}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (listing((2, "x"), (1, "x")), "InvalidPartOrder"),
        (listing((1, "x"), (1, "x")), "InvalidPartOrder"),
        (listing((1, '"0123"')), "InvalidPart"),
        (listing((3, '"0123"')), "InvalidPart"),
        (listing(), "MalformedXML"),
        (b"", "MalformedXML"),
        (b"<CompleteMultipartUpload>", "MalformedXML"),
        (b"<Other/>", "MalformedXML"),
        (listing(("x", "x")), "MalformedXML"),
        (listing((1, "")), "MalformedXML"),
    ],
    ids=[
        "descending",
        "twice",
        "wrong etag",
        "no such part",
        "no parts",
        "empty",
        "cut",
        "other root",
        "no number",
        "no etag",
    ],
)
def test_a_list_that_makes_no_object_is_rejected(server, call, body, expected):
    """It is 400, and the upload stays open."""
    upload_id = begin(call)
    etag = put(call, upload_id, 1, b"x").headers["ETag"]
    assert code(complete(call, upload_id, body)) == (400, expected)
    assert server.keys("bucket") == []
    assert complete(call, upload_id, listing((1, etag))).status == 200


@pytest.mark.parametrize(
    "namespace",
    [
        ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"',
        ' xmlns="http://doc.s3.amazonaws.com/2006-03-01"',
    ],
)
def test_a_list_may_have_a_namespace(call, namespace):
    """Any, as well as none."""
    upload_id = begin(call)
    etag = put(call, upload_id, 1, b"x").headers["ETag"]
    assert complete(call, upload_id, listing((1, etag), namespace=namespace)).status == 200


def test_etags_may_come_without_quotes(call):
    """Clients differ in that."""
    upload_id = begin(call)
    etag = put(call, upload_id, 1, b"x").headers["ETag"].strip('"')
    assert complete(call, upload_id, listing((1, etag))).status == 200


@pytest.mark.parametrize("name", ["x_goog_if_generation_match", "x_goog_if_metageneration_match"])
def test_preconditions_are_rejected(call, name):
    """Multipart uploads cannot keep them: 400 NotImplemented at every step."""
    rejected = (400, "NotImplemented")
    assert code(call("POST", f"{TARGET}?uploads", b"", **{name: "0"})) == rejected
    upload_id = begin(call)
    assert code(put(call, upload_id, 1, b"x", **{name: "0"})) == rejected
    etag = put(call, upload_id, 1, b"x").headers["ETag"]
    assert code(complete(call, upload_id, listing((1, etag)), **{name: "0"})) == rejected
    assert complete(call, upload_id, listing((1, etag))).status == 200


def test_parts_are_listed_in_pages(call):
    """By number, from a marker on, with size and ETag."""
    upload_id = begin(call)
    etags = {
        number: put(call, upload_id, number, b"x" * number).headers["ETag"] for number in (9, 2, 5)
    }
    found, marker = [], "0"
    while True:
        query = f"uploadId={upload_id}&max-parts=2&part-number-marker={marker}"
        response = call("GET", f"{TARGET}?{query}")
        rows = ET.fromstring(response.body).iter(f"{NAMESPACE}Part")
        found += [
            [row.findtext(NAMESPACE + n) for n in ("PartNumber", "Size", "ETag")] for row in rows
        ]
        if text(response, "IsTruncated") == "false":
            break
        marker = text(response, "NextPartNumberMarker")
    assert found == [[str(n), str(n), etags[n]] for n in (2, 5, 9)]


def test_an_upload_needs_its_bucket(call):
    """Without it, it is NoSuchBucket."""
    assert code(call("POST", "/none/key?uploads", b"")) == (404, "NoSuchBucket")


def test_a_page_of_no_parts_is_the_last(call):
    """A page of none has no next: that would be the same one, for ever."""
    upload_id = begin(call)
    put(call, upload_id, 1, b"data")
    response = call("GET", f"{TARGET}?uploadId={upload_id}&max-parts=0")
    assert text(response, "IsTruncated") == "false"


def test_a_part_number_of_too_many_digits_is_400(call):
    """More digits than Python reads are the caller's error."""
    body = f"<CompleteMultipartUpload><Part><PartNumber>{'1' * 5000}</PartNumber><ETag>x</ETag>"
    response = complete(call, begin(call), f"{body}</Part></CompleteMultipartUpload>".encode())
    assert code(response) == (400, "MalformedXML")
