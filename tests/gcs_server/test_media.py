"""Downloads over both APIs."""

from __future__ import annotations

import json

import pytest

DATA = bytes(range(100))


@pytest.mark.parametrize("root", ["/storage/v1", "/download/storage/v1"])
@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-9", 0, 10),
        ("bytes=90-", 90, 100),
        ("bytes=-5", 95, 100),
        ("bytes=-500", 0, 100),
        ("bytes=95-500", 95, 100),
    ],
    ids=["closed", "open", "suffix", "suffix past the start", "past the end"],
)
def test_a_range_is_clipped_to_the_object(server, call, root, header, start, end):
    server.put("bucket", "key", DATA)
    response = call("GET", f"{root}/b/bucket/o/key?alt=media", Range=header)
    assert response.status == 206
    assert response.body == DATA[start:end]
    assert response.headers["Content-Range"] == f"bytes {start}-{end - 1}/100"


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=200-300", "bytes=-0"])
def test_a_range_beyond_the_object_is_416(server, call, header):
    server.put("bucket", "key", DATA)
    response = call("GET", "/storage/v1/b/bucket/o/key?alt=media", Range=header)
    assert response.status == 416
    assert response.headers["Content-Range"] == "bytes */100"


def test_an_absent_object_has_the_error_body_of_each_api(call):
    response = call("GET", "/storage/v1/b/bucket/o/none")
    assert response.status == 404
    assert json.loads(response.body)["error"]["errors"][0]["reason"] == "notFound"
    response = call("GET", "/bucket/none")
    assert response.status == 404
    assert b"<Code>NoSuchKey</Code>" in response.body
    assert b"<Code>NoSuchBucket</Code>" in call("GET", "/other/none").body


def test_xml_put_get_and_head_agree(server, call):
    response = call("PUT", "/bucket/a/b%2Fc", DATA, Content_Type="x/y", x_goog_meta_colour="red")
    assert response.status == 200
    assert server.keys("bucket") == ["a/b/c"]
    assert server.get("bucket", "a/b/c") == DATA
    got, head = call("GET", "/bucket/a/b%2Fc"), call("HEAD", "/bucket/a/b%2Fc")
    assert (got.body, head.body) == (DATA, b"")
    assert got.headers.items() == head.headers.items()
    assert got.headers["Content-Type"] == "x/y"
    assert got.headers["x-goog-meta-colour"] == "red"
    assert got.headers["ETag"] == response.headers["ETag"]
    assert [value.partition("=")[0] for value in got.headers.get_all("x-goog-hash")] == [
        "crc32c",
        "md5",
    ]
