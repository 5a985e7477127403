"""Sub-resources of the XML API that the server lacks are rejected, and nothing is changed."""

from __future__ import annotations

import pytest

SUBRESOURCES = ["acl", "tagging", "compose", "retention"]
OF_BUCKETS = ["acl", "cors", "lifecycle", "logging", "policy", "tagging", "website"]


@pytest.mark.parametrize("query", SUBRESOURCES)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_those_of_an_object_are_501(server, call, method, query):
    """They neither return, nor overwrite, nor delete the object."""
    server.put("bucket", "key", b"data")
    body = b"other" if method == "PUT" else None
    assert call(method, f"/bucket/key?{query}", body).status == 501
    assert server.get("bucket", "key") == b"data"


@pytest.mark.parametrize("query", ["uploads", "uploadId=x", "partNumber=1"])
@pytest.mark.parametrize("method", ["HEAD", "PUT"])
def test_half_of_what_names_a_part_is_400(server, call, method, query):
    """`partNumber` and `uploadId` go together; neither leads to the object itself."""
    server.put("bucket", "key", b"data")
    body = b"other" if method == "PUT" else None
    assert call(method, f"/bucket/key?{query}", body).status == 400
    assert server.get("bucket", "key") == b"data"


def test_a_part_number_alone_deletes_nothing(server, call):
    """DELETE with a part number is 400."""
    server.put("bucket", "key", b"data")
    assert call("DELETE", "/bucket/key?partNumber=1").status == 400
    assert server.keys("bucket") == ["key"]


@pytest.mark.parametrize("query", OF_BUCKETS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_those_of_a_bucket_are_501(server, call, method, query):
    """They neither list, nor describe, nor delete the bucket."""
    assert call(method, f"/bucket?{query}").status == 501
    assert list(server.state.buckets) == ["bucket"]


@pytest.mark.parametrize("query", ["cors", "location", "uploads"])
def test_none_creates_a_bucket(server, call, query):
    """PUT of a sub-resource of a bucket that does not exist leaves it so."""
    assert call("PUT", f"/second?{query}").status == 501
    assert list(server.state.buckets) == ["bucket"]
