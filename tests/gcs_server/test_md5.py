"""`GCSServer(md5=False)`: uploads without an MD5, as composed objects are on GCS."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from aioflux.testing import GCSServer


@pytest.fixture
def server():
    with GCSServer(buckets=("bucket",), md5=False) as server:
        yield server


def test_objects_have_a_crc32c_and_one_etag_on_write_and_read(call):
    put, get = call("PUT", "/bucket/k", b"data"), call("GET", "/bucket/k")
    assert put.headers["ETag"] == get.headers["ETag"]
    assert put.headers.get_all("x-goog-hash") == ["crc32c=rth90Q=="]
    resource = json.loads(call("GET", "/storage/v1/b/bucket/o/k").body)
    assert "md5Hash" not in resource


def test_declared_md5_is_still_checked(call):
    right, wrong = (
        base64.b64encode(hashlib.md5(data).digest()).decode() for data in (b"data", b"other")
    )
    assert call("PUT", "/bucket/k", b"data", Content_MD5=wrong).status == 400
    response = call("PUT", "/bucket/k", b"data", Content_MD5=right)
    assert f"md5={right}" in response.headers.get_all("x-goog-hash")


def test_parts_make_an_object(server, call):
    begun = call("POST", "/bucket/k?uploads").body.decode()
    upload_id = re.search("<UploadId>(.*)</UploadId>", begun)[1]
    part = call("PUT", f"/bucket/k?uploadId={upload_id}&partNumber=1", b"data")
    entry = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['ETag']}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{entry}</CompleteMultipartUpload>".encode()
    assert call("POST", f"/bucket/k?uploadId={upload_id}", document).status == 200
    assert server.get("bucket", "k") == b"data"
