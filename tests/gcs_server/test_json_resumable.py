"""Resumable uploads, by raw requests."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from urllib.parse import urlsplit

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing.gcs_server._messages import slice_pieces

STEP = 256 << 10
START = "/upload/storage/v1/b/bucket/o?uploadType=resumable"
DATA = b"".join(number.to_bytes(4, "big") for number in range(200_000))  # 3.05 steps


def start(call, query: str = "&name=key", resource: dict | None = None, **headers: str) -> str:
    body = None if resource is None else json.dumps(resource).encode()
    response = call("POST", START + query, body, **headers)
    assert (response.status, response.body) == (200, b"")
    parts = urlsplit(response.headers["Location"])
    return f"{parts.path}?{parts.query}"


def put(call, session: str, begin: int, end: int, total: int | str):
    content_range = f"bytes {begin}-{end - 1}/{total}"
    return call("PUT", session, DATA[begin:end], Content_Range=content_range)


def status(call, session: str, total: int | str = "*"):
    return call("PUT", session, b"", Content_Range=f"bytes */{total}")


def crc32c(data: bytes) -> str:
    return base64.b64encode(struct.pack(">I", google_crc32c.value(data))).decode()


def test_pieces_make_an_object_with_both_checksums(server, call):
    session = start(call)
    for begin in (0, STEP, 2 * STEP):
        response = put(call, session, begin, begin + STEP, "*")
        assert response.status == 308
        assert response.headers["Range"] == f"bytes=0-{begin + STEP - 1}"
        assert server.keys("bucket") == []
    response = put(call, session, 3 * STEP, len(DATA), len(DATA))
    assert response.status == 200
    resource = json.loads(response.body)
    assert resource["crc32c"] == crc32c(DATA)
    assert resource["md5Hash"] == base64.b64encode(hashlib.md5(DATA).digest()).decode()
    assert server.get("bucket", "key") == DATA


def test_the_session_has_the_callers_host(server, call):
    response = call("POST", f"{START}&name=key", Host="storage.example:81")
    assert response.headers["Location"].startswith("http://storage.example:81/upload/storage/v1/b/")


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_request_without_content_range_brings_the_whole(server, call, method):
    assert call(method, start(call), DATA).status == 200
    assert server.get("bucket", "key") == DATA


@pytest.mark.parametrize("header", [None, "bytes */0"], ids=["plain", "by size"])
def test_an_object_may_be_empty(server, call, header):
    headers = {"Content_Range": header} if header else {}
    assert call("PUT", start(call), b"", **headers).status == 200
    assert server.get("bucket", "key") == b""


def test_a_new_session_has_no_range(call):
    response = status(call, start(call))
    assert response.status == 308
    assert "Range" not in response.headers


def test_a_status_query_reports_what_is_persisted(call):
    session = start(call)
    put(call, session, 0, 2 * STEP, len(DATA))
    assert status(call, session).headers["Range"] == f"bytes=0-{2 * STEP - 1}"
    assert status(call, session, len(DATA)).status == 308


def test_a_piece_that_is_not_last_counts_in_steps_of_256_kib(server, call):
    session = start(call)
    response = put(call, session, 0, STEP + 1000, "*")
    assert response.headers["Range"] == f"bytes=0-{STEP - 1}"
    put(call, session, STEP, len(DATA), len(DATA))
    assert server.get("bucket", "key") == DATA


def test_a_piece_below_256_kib_that_is_not_last_is_400(call):
    session = start(call)
    assert put(call, session, 0, STEP - 1, "*").status == 400
    assert "Range" not in status(call, session).headers


def test_bytes_sent_again_are_skipped(server, call):
    session = start(call)
    put(call, session, 0, 2 * STEP, "*")
    response = call(
        "PUT",
        session,
        bytes(STEP) + DATA[2 * STEP : 3 * STEP],
        Content_Range=f"bytes {STEP}-{3 * STEP - 1}/*",
    )
    assert response.headers["Range"] == f"bytes=0-{3 * STEP - 1}"
    assert put(call, session, 0, STEP, "*").headers["Range"] == f"bytes=0-{3 * STEP - 1}"
    put(call, session, 3 * STEP, len(DATA), len(DATA))
    assert server.get("bucket", "key") == DATA


def test_a_gap_is_503_and_changes_nothing(call):
    session = start(call)
    put(call, session, 0, STEP, "*")
    assert put(call, session, 2 * STEP, 3 * STEP, "*").status == 503
    assert status(call, session).headers["Range"] == f"bytes=0-{STEP - 1}"


def test_the_size_may_follow_the_last_byte(server, call):
    session = start(call)
    put(call, session, 0, STEP, "*")
    assert status(call, session, STEP).status == 200
    assert server.get("bucket", "key") == DATA[:STEP]


def test_the_size_may_be_named_at_the_start(server, call):
    session = start(call, X_Upload_Content_Length=str(STEP))
    assert put(call, session, 0, STEP, "*").status == 200
    assert put(call, start(call, X_Upload_Content_Length="9"), 0, 8, 8).status == 400


def test_a_query_after_the_end_gives_the_object(server, call):
    session = start(call)
    done = put(call, session, 0, 10, 10)
    server.put("bucket", "key", b"written since")
    assert status(call, session).body == done.body
    assert put(call, session, 0, 10, 10).body == done.body
    assert server.get("bucket", "key") == b"written since"


def test_a_cancelled_session_is_gone(server, call):
    session = start(call)
    put(call, session, 0, STEP, "*")
    assert call("DELETE", session).status == 499
    assert status(call, session).status == 404
    assert server.keys("bucket") == []


def test_an_unknown_session_is_404(call):
    assert status(call, f"{START}&upload_id=none").status == 404


@pytest.mark.parametrize(
    "header",
    ["bytes 0-9", "bytes 9-0/10", "0-9/10", "bytes 0-9/5", "bytes 0-8/10", "bytes */*"],
    ids=["no size", "backwards", "no unit", "past the end", "not the body's", "query with a body"],
)
def test_a_content_range_that_does_not_fit_is_400(server, call, header):
    session = start(call)
    assert call("PUT", session, bytes(10), Content_Range=header).status == 400
    assert "Range" not in status(call, session).headers


def test_a_size_that_changes_is_400(call):
    session = start(call)
    put(call, session, 0, STEP, len(DATA))
    assert put(call, session, STEP, 2 * STEP, len(DATA) + 1).status == 400


def test_attributes_come_with_the_start(call):
    resource = {"name": "key", "metadata": {"a": "b"}, "cacheControl": "no-store"}
    session = start(call, "", resource, X_Upload_Content_Type="x/y")
    made = json.loads(put(call, session, 0, 10, 10).body)
    assert made["contentType"] == "x/y"
    assert (made["metadata"], made["cacheControl"]) == ({"a": "b"}, "no-store")


@pytest.mark.parametrize("place", ["start", "end"])
def test_a_declared_checksum_is_compared_at_the_end(server, call, place):
    wrong = crc32c(b"other")
    session = start(call, resource={"crc32c": wrong} if place == "start" else None)
    headers = {"X_Goog_Hash": f"crc32c={wrong}"} if place == "end" else {}
    response = call("PUT", session, DATA[:10], Content_Range="bytes 0-9/10", **headers)
    assert response.status == 400
    assert server.keys("bucket") == []


def test_a_precondition_is_judged_at_the_start(server, call):
    server.put("bucket", "key", b"old")
    response = call("POST", f"{START}&name=key&ifGenerationMatch=0")
    assert response.status == 412
    assert "Location" not in response.headers


def test_a_precondition_is_judged_again_at_the_end(server, call):
    session = start(call, "&name=key&ifGenerationMatch=0")
    server.put("bucket", "key", b"came between")
    assert put(call, session, 0, 10, 10).status == 412
    assert server.get("bucket", "key") == b"came between"


def test_a_start_without_name_or_bucket_is_rejected(call):
    assert call("POST", START).status == 400
    assert call("POST", f"{START}&name=..").status == 400
    assert call("POST", f"{START.replace('bucket', 'none')}&name=key").status == 404


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=5), max_size=5), st.integers(0, 30), st.integers(0, 30))
def test_a_cut_through_pieces_is_a_cut_through_their_whole(pieces, start, end):
    cut = b"".join(slice_pieces(pieces, start, end))
    assert cut == b"".join(pieces)[start:end]


def test_a_content_range_of_too_many_digits_is_400(call):
    """More digits than Python reads are the caller's error."""
    begun = call("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=k", b"{}")
    span = f"bytes 0-*/{'9' * 5000}"
    assert call("PUT", begun.headers["Location"], b"data", Content_Range=span).status == 400
