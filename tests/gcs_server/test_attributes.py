"""Attributes become response headers: what no header can hold stays out of them."""

from __future__ import annotations

import json

import pytest

OBJECTS = "/upload/storage/v1/b/bucket/o"
OBJECT = "/storage/v1/b/bucket/o/key"
BREAKS = ["\r\nX-Evil: 1", "\n", "\r", "\0"]


def insert(call, resource: dict, content_type: str = "x/y"):
    head = json.dumps({"name": "key", **resource})
    body = f"--limit\r\n\r\n{head}\r\n--limit\r\nContent-Type: {content_type}\r\n\r\ndata\r\n"
    return call(
        "POST",
        f"{OBJECTS}?uploadType=multipart",
        f"{body}--limit--".encode(),
        Content_Type="multipart/related; boundary=limit",
    )


@pytest.mark.parametrize("end", BREAKS, ids=repr)
@pytest.mark.parametrize(
    "resource",
    [
        lambda text: {"contentType": text},
        lambda text: {"cacheControl": text},
        lambda text: {"metadata": {"a": text}},
        lambda text: {"metadata": {text: "a"}},
    ],
    ids=["contentType", "cacheControl", "metadata", "name of metadata"],
)
def test_line_breaks_are_400_on_insert_and_patch(server, call, resource, end):
    """A line break in an attribute would be a header of the writer's choice."""
    given = resource(f"a/b{end}")
    assert insert(call, given).status == 400
    assert server.keys("bucket") == []
    server.put("bucket", "key", b"data")
    assert call("PATCH", OBJECT, json.dumps(given).encode()).status == 400


def test_a_line_break_in_the_query_or_a_part_is_400(server, call):
    """The content encoding of a query and the type of a part are attributes, too."""
    query = "uploadType=media&name=key&contentEncoding=a%0D%0AX-Evil:%201"
    assert call("POST", f"{OBJECTS}?{query}", b"data").status == 400
    assert insert(call, {}, "x/y\0").status == 400
    assert server.keys("bucket") == []


def test_metadata_that_no_header_can_name_is_left_out_of_downloads(call):
    """The resource has all metadata; headers have those whose names are tokens."""
    metadata = {"ü": "1", "a b": "2", "": "3", "bell": "\a", "kept": "日本"}
    assert insert(call, {"metadata": metadata}).status == 200
    assert json.loads(call("GET", OBJECT).body)["metadata"] == metadata
    for target in (f"{OBJECT}?alt=media", "/bucket/key"):
        response = call("GET", target)
        assert response.body == b"data"
        assert [name for name in response.headers if name.startswith("x-goog-meta-")] == [
            "x-goog-meta-kept"
        ]
