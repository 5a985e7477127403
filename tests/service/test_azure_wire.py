"""How Azure writes things: names, headers, block ids, bodies and errors."""

from __future__ import annotations

import base64
import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)
from aioflux._services.azure import batch, wire
from aioflux._services.base import Precondition, ReadRequest, WriteRequest
from aioflux._services.responses import Failure, RequestKind
from aioflux._values.meta import ObjectAttributes
from tests.service.responses import response

WHEN = b"Sun, 22 Nov 2026 07:00:00 GMT"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 characters"),
        ("k" * 1025, "1025 characters"),
        ("a\rb", "line break"),
        ("a\nb", "line break"),
        ("a\\b", "backslash"),
        (".", "'.' or '..'"),
        ("a/../b", "'.' or '..'"),
        ("a./b", "end with a dot"),
        ("a.", "end with a dot"),
    ],
)
def test_a_name_that_no_blob_can_have_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        wire.check_name(f"{name}", name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", ["k" * 1024, "\u00e9" * 1024, "/a", "a//b", "a/", ".a", "a.b/c"])
def test_other_names_are_taken(name: str) -> None:
    wire.check_name(name, name)


def test_preconditions_are_etags() -> None:
    assert wire.precondition_headers(Precondition()) == []
    assert wire.precondition_headers(Precondition(if_absent=True)) == [(b"If-None-Match", b"*")]
    expected = Precondition(if_generation_match="0x8D")
    assert wire.precondition_headers(expected) == [(b"If-Match", b'"0x8D"')]
    for none in ('a"b', "a b", "", "\u00e9", "a\r\nb"):
        with pytest.raises(ValueError, match="not an ETag"):
            wire.match_header(none)


def test_an_object_is_described_by_its_headers() -> None:
    assert wire.object_headers(ObjectAttributes()) == [
        (b"x-ms-blob-content-type", b"application/octet-stream")
    ]
    assert wire.object_headers(
        ObjectAttributes(content_type="image/png", metadata={"label_1": "a cat"})
    ) == [
        (b"x-ms-blob-content-type", b"image/png"),
        (b"x-ms-meta-label_1", b"a cat"),
    ]


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "\u00e9", "a:b"])
def test_metadata_has_names_of_identifiers(name: str) -> None:
    with pytest.raises(ValueError, match="cannot have the name"):
        wire.object_headers(ObjectAttributes(metadata={name: "1"}))


@pytest.mark.parametrize("value", [" a", "a\n", "a\tb", "\u00e9"])
def test_metadata_has_values_of_printable_ascii(value: str) -> None:
    with pytest.raises(ValueError, match="cannot have the value"):
        wire.object_headers(ObjectAttributes(metadata={"a": value}))


def test_metadata_is_read_from_headers() -> None:
    headers = {
        b"etag": b'"0x8D"',
        b"last-modified": WHEN,
        b"content-type": b"text/csv",
        b"content-encoding": b"gzip",
        b"x-ms-access-tier": b"Cool",
        b"x-ms-meta-rows": b"7",
    }
    meta = wire.meta_from_headers(headers, key="k", uri="az://a/c/k", size=3)
    assert (meta.etag, meta.generation, meta.crc32c) == ("0x8D", "0x8D", None)
    assert meta.updated == datetime(2026, 11, 22, 7, tzinfo=UTC)
    assert (meta.content_type, meta.content_encoding) == ("text/csv", "gzip")
    assert (meta.storage_class, dict(meta.metadata)) == ("Cool", {"rows": "7"})
    written = WriteRequest("k", attributes=ObjectAttributes(content_type="a/b"))
    bare = wire.meta_from_headers({}, key="k", uri="u", size=0, written=written)
    assert (bare.etag, bare.updated, bare.content_type) == ("", None, "a/b")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({b"x-ms-resource-type": b"directory"}, True),
        ({b"x-ms-resource-type": b"file"}, False),
        ({b"x-ms-meta-hdi_isfolder": b"True"}, True),
    ],
)
def test_directories_are_distinguished_from_objects(
    headers: dict[bytes, bytes], expected: bool
) -> None:
    assert wire.is_directory(headers) is expected


def test_the_md5_of_the_whole_is_in_one_header_or_the_other() -> None:
    told = base64.b64encode(bytes(range(16)))
    assert wire.md5_of({b"content-md5": told}, is_part=False) == bytes(range(16))
    assert wire.md5_of({b"content-md5": told}, is_part=True) is None
    assert wire.md5_of({b"x-ms-blob-content-md5": told}, is_part=True) == bytes(range(16))
    for damaged in (b"x", base64.b64encode(b"short")):
        with pytest.raises(ValueError, match=r"base64|16 bytes"):
            wire.md5_of({b"content-md5": damaged}, is_part=False)


@given(now=st.integers(0, 2**32 - 1), random=st.binary(min_size=12, max_size=12))
def test_an_upload_is_recognized_by_its_blocks(now: int, random: bytes) -> None:
    upload_id = wire.new_upload_id(now, random)
    assert wire.upload_initiated(upload_id).timestamp() == now
    ids = [wire.block_id(upload_id, number) for number in (1, 17, 50_000)]
    assert len({len(each) for each in ids}) == 1  # the service wants them of one length
    assert all(len(base64.b64decode(each)) <= 64 for each in ids)
    assert [wire.parse_block_id(each) for each in ids] == [
        (upload_id, number) for number in (1, 17, 50_000)
    ]


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"block-000001").decode()])
def test_blocks_of_others_belong_to_no_upload(text: str) -> None:
    assert wire.parse_block_id(text) is None


def test_block_lists() -> None:
    assert wire.block_list(["a", "b"]).endswith(
        b"<BlockList><Latest>a</Latest><Latest>b</Latest></BlockList>"
    )
    held = wire.parse_block_list(
        b"\xef\xbb\xbf<BlockList><CommittedBlocks/><UncommittedBlocks><Block><Name>YQ==</Name>"
        b"<Size>4</Size></Block></UncommittedBlocks></BlockList>"
    )
    assert held == (False, ["YQ=="])
    held = wire.parse_block_list(
        b"<BlockList><CommittedBlocks><Block><Name>YQ==</Name></Block></CommittedBlocks></BlockList>"
    )
    assert held == (True, [])
    for damaged in (b"<Error/>", b"<BlockList>", b""):
        with pytest.raises(ValueError, match=r"<Error>|not XML"):
            wire.parse_block_list(damaged)


BODY = (
    b"\xef\xbb\xbf<?xml version='1.0'?><Error><Code>AuthenticationFailed</Code><Message>Server "
    b"failed.\nRequestId:1\nTime:2</Message><AuthenticationErrorDetail>sig=planted"
    b"</AuthenticationErrorDetail></Error>"
)


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, BODY, ("AuthenticationFailed", "Server failed.")),
        ({b"x-ms-error-code": b"BlobNotFound"}, b"", ("BlobNotFound", "")),
        ({b"x-ms-error-code": b"X"}, BODY, ("X", "Server failed.")),
        ({}, b"<html>", ("", "")),
        ({}, b"<Error/>", ("", "")),
    ],
)
def test_an_error_is_its_code_and_message(
    headers: dict[bytes, bytes], body: bytes, expected: tuple[str, str]
) -> None:
    assert wire.parse_error(headers, body) == expected


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (404, "BlobNotFound", NotFoundError, "list the prefix"),
        (404, "ContainerNotFound", NotFoundError, "no such container"),
        (409, "BlobAlreadyExists", PreconditionFailedError, "not the expected one"),
        (412, "ConditionNotMet", PreconditionFailedError, "not the expected one"),
        (412, "", PreconditionFailedError, "not the expected one"),
        (412, "LeaseIdMissing", StorageError, "lease"),
        (412, "Unheard", StorageError, "HTTP 412 Unheard$"),
        (400, "InvalidBlockList", PreconditionFailedError, "another write of this object"),
        (400, "Md5Mismatch", ChecksumError, "received other bytes"),
        (401, "NoAuthenticationInformation", PermissionDeniedError, "no credentials were sent"),
        (403, "AuthenticationFailed", PermissionDeniedError, "clock"),
        (403, "AuthorizationFailure", PermissionDeniedError, "firewall"),
        (403, "AuthorizationPermissionMismatch", PermissionDeniedError, "Blob Data Contributor"),
        (403, "", PermissionDeniedError, "may read objects"),
        (409, "PublicAccessNotPermitted", PermissionDeniedError, "no anonymous access"),
        (409, "BlobArchived", StorageError, "archive tier"),
        (409, "SnapshotsPresent", StorageError, "snapshots"),
        (503, "ServerBusy", TransientError, "HTTP 503 ServerBusy"),
        (500, "OperationTimedOut", TransientError, "HTTP 500"),
        (400, "InvalidHeaderValue", StorageError, "HTTP 400 InvalidHeaderValue"),
    ],
)
def test_what_an_answer_means(status: int, code: str, error: type[Exception], says: str) -> None:
    uri = "az://acct/container/key"
    found = wire.service_error(
        Failure(status, action="read", uri=uri, code=code, detail="", retry_after="7")
    )
    with pytest.raises(error, match=says):
        raise found
    assert type(found) is error
    assert (found.uri, found.status) == (uri, status)
    assert uri in str(found)
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


def test_what_must_have_a_generation_and_is_not_there_has_not_got_it() -> None:
    def error(code: str) -> StorageError:
        return wire.service_error(
            Failure(
                404,
                action="a",
                uri="u",
                code=code,
                detail="",
                retry_after=None,
                kind=RequestKind(is_conditional=True),
            )
        )

    assert isinstance(error("BlobNotFound"), PreconditionFailedError)
    assert isinstance(error("ContainerNotFound"), NotFoundError)


# --- batches -----------------------------------------------------------------------------


def test_a_batch_is_requests_in_parts() -> None:
    body = batch.batch_body([(b"/a/c/k", [(b"If-Match", b"e")]), (b"/a/c/l?sig=1", [])])
    assert batch.batch_type()[1].endswith(b"boundary=batch_aioflux")
    first, second = body.split(b"--batch_aioflux")[1:3]
    assert b"Content-ID: 0\r\n\r\nDELETE /a/c/k HTTP/1.1\r\nIf-Match: e\r\n" in first
    assert b"Content-ID: 1\r\n\r\nDELETE /a/c/l?sig=1 HTTP/1.1\r\n" in second
    assert body.endswith(b"\r\n\r\n--batch_aioflux--\r\n")


ANSWERS = (
    b"--x\r\nContent-Type: application/http\r\nContent-ID: 1\r\n\r\n"
    b"HTTP/1.1 404 Not here\r\nx-ms-error-code: BlobNotFound\r\n\r\n<Error/>\r\n"
    b"--x\r\nContent-ID: 0\r\n\r\nHTTP/1.1 202 Accepted\r\nx-ms-version: 1\r\n\r\n\r\n--x--"
)


@pytest.mark.parametrize("told", [b"multipart/mixed; boundary=x", b'Multipart/Mixed; Boundary="x"'])
def test_responses_of_a_batch_are_matched_by_number(told: bytes) -> None:
    found = batch.parse_batch(told, ANSWERS)
    assert found[0] == (202, {b"x-ms-version": b"1"}, b"")
    assert found[1] == (404, {b"x-ms-error-code": b"BlobNotFound"}, b"<Error/>")


@pytest.mark.parametrize(
    ("told", "data", "says"),
    [
        (b"text/html", ANSWERS, "not multipart"),
        (b"a/b; boundary=x", ANSWERS[:-3], "truncated"),
        (
            b"a/b; boundary=x",
            ANSWERS.replace(b"HTTP/1.1 404", b"FTP"),
            "not an HTTP response",
        ),
        (b"a/b; boundary=x", ANSWERS.replace(b"-ID: 1", b"-ID: x"), "not an HTTP response"),
    ],
)
def test_what_is_no_answer_to_a_batch_is_refused(told: bytes, data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        batch.parse_batch(told, data)


# --- answers to reads --------------------------------------------------------------------

TOLD = {b"etag": b'"0x8D"', b"x-ms-request-id": b"1"}


@pytest.mark.parametrize(
    ("status", "part", "num_bytes", "start", "end", "generation", "expected"),
    [
        (200, None, 5, 0, None, "", 5),
        (200, None, 5, 0, 5, "0x8D", 5),
        (200, None, 5, 0, 4, "", "ignored the range"),
        (200, None, 5, 2, None, "", "ignored the range"),
        (206, b"bytes 0-4/9", 5, 0, 5, "0x8D", 9),
        (206, b"bytes 2-4/5", 3, 2, 9, "", 5),
        (206, b"bytes 2-4/5", 3, 2, None, "", 5),
        (206, b"bytes 0-4/5", 5, 0, None, "", "in place of the whole"),
        (206, b"bytes 1-4/5", 4, 0, 5, "", "is not the range from byte"),
        (206, b"bytes 0-4/9", 4, 0, 5, "", "is not the range from byte"),
        (206, b"bytes 0-4/4", 5, 0, 5, "", "is not the range from byte"),
        (206, b"bytes 0-4/9", 5, 0, 4, "", "is longer than the requested"),
        (206, None, 5, 0, 5, "", "is not one range"),
        (206, b"bytes 0-4/9", 5, 0, 5, "0x9", "of generation 0x8D"),
        (204, None, 0, 0, 5, "", "is not a response to a read"),
    ],
)
def test_a_response_is_what_was_requested_or_refused(
    status: int,
    part: bytes | None,
    num_bytes: int,
    start: int,
    end: int | None,
    generation: str,
    expected: int | str,
) -> None:
    headers = TOLD if part is None else {**TOLD, b"content-range": part}
    request = ReadRequest("a", generation, start, end)
    told = response(status, headers, num_bytes)
    if isinstance(expected, int):
        assert wire.object_size(request, told) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            wire.object_size(request, told)


def test_a_range_that_holds_the_whole_object_has_its_size() -> None:
    whole = response(206, {**TOLD, b"content-range": b"bytes 0-4/5"}, 5)
    assert wire.object_size(ReadRequest("a", end=10), whole) == 5


@pytest.mark.parametrize("missing", TOLD)
def test_a_response_of_another_server_is_rejected(missing: bytes) -> None:
    headers = {name: value for name, value in TOLD.items() if name != missing}
    with pytest.raises(ValueError, match="it is not from Azure"):
        wire.object_size(ReadRequest("a"), response(200, headers, 5))


@pytest.mark.parametrize(
    ("told", "start", "expected"),
    [
        (b"bytes */5", 5, 5),
        (b"bytes */5", 4, None),
        (b"bytes 5-4/5", 5, 5),
        (b"bytes 0-4/5", 5, None),
        (b"", 5, None),
    ],
)
def test_the_size_may_be_reported_past_the_end(
    told: bytes, start: int, expected: int | None
) -> None:
    assert wire.size_past_the_end({b"content-range": told}, start=start) == expected


def test_ranges_are_written_as_the_service_signs_them() -> None:
    assert wire.range_header(2, 5) == (b"x-ms-range", b"bytes=2-4")
    assert wire.range_header(2, None) == (b"x-ms-range", b"bytes=2-")
