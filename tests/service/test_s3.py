"""S3: what is sent, what its answers and refusals mean, and what is asked again in another way."""

from __future__ import annotations

import asyncio
import email.utils
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from botocore.credentials import Credentials

from aioflux import (
    AiofluxError,
    ChecksumError,
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    S3Access,
    StorageError,
    TransientError,
    open_store,
)
from aioflux._http import Origin
from aioflux._services.base import (
    MAX_EMPTY_PAGES,
    ListRequest,
    PartRequest,
    Precondition,
    ReadRequest,
    Source,
    UploadedPart,
    WriteRequest,
)
from aioflux._services.s3.endpoint import Endpoint
from aioflux._services.s3.sender import S3Sender
from aioflux._services.s3.service import S3Service
from aioflux._values.meta import ObjectAttributes
from tests.servers.statuses import AMBIGUOUS
from tests.service.opening import open_service
from tests.service.s3_rig import (
    ANY,
    ETAG,
    OPERATIONS,
    PIN,
    answer,
    asking,
    hello,
    service_error,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.service.s3_rig import Asked

KEYS = S3Access(credentials=lambda: ("AKID", "s"))
CRC32C = "mnG7TA=="
"""Of `hello`."""


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_busy_service_is_retried_when_it_says(operation: str) -> None:
    async with asking(service_error(503, "SlowDown", Retry_After="7")) as (service, _):
        with pytest.raises(TransientError) as error:
            await OPERATIONS[operation](service)
    assert error.value.status == 503
    assert error.value.retry_after_seconds == 7
    # A read, such as that of the source of a copy, changes nothing, whatever its response.
    reads = {"head", "get", "small_read", "list", "list_uploads", "copy"}
    assert error.value.maybe_done is (operation not in reads)


@pytest.mark.parametrize("code", ["RequestTimeout", "SlowDown", "InternalError"])
@pytest.mark.parametrize("status", [400, *AMBIGUOUS])
async def test_a_code_that_passes_leaves_open_what_was_done(code: str, status: int) -> None:
    """Whatever status a server sends it with; the wait that it asks for is kept."""
    async with asking(service_error(status, code, Retry_After="7")) as (service, _):
        with pytest.raises(TransientError) as error:
            await service.put(WriteRequest("b"), [b"1"], crc32c=None)
    assert error.value.maybe_done
    assert error.value.retry_after_seconds == (None if status == 400 else 7)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_what_is_forbidden_is_not_asked_again(operation: str) -> None:
    async with asking(service_error(403, "AccessDenied")) as (service, asked):
        with pytest.raises(PermissionDeniedError, match="s3:ListBucket"):
            await OPERATIONS[operation](service)
    assert len(asked) == (2 if operation == "small_read" else 1)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_every_request_is_signed(operation: str) -> None:
    async with asking(service_error(404, "NoSuchKey")) as (service, asked):
        with suppress(StorageError):  # an abort takes it as done
            await OPERATIONS[operation](service)
    for each in asked:
        assert each.headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKID/")
        assert each.target.startswith("/bucket")
    assert "hush" not in repr(asked)


@pytest.mark.parametrize("operation", ["get", "head", "put", "delete", "put_part", "initiate"])
async def test_a_page_that_stands_in_for_every_answer_is_not_believed(operation: str) -> None:
    """Such as a hotel's, for all urls."""
    page = answer(200, "<html>Welcome</html>" if operation != "head" else b"")
    async with asking(page) as (service, _):
        with pytest.raises(StorageError):
            await OPERATIONS[operation](service)


# --- keys, regions and clocks ------------------------------------------------------------------


async def test_a_request_goes_to_the_region_that_a_refusal_reports() -> None:
    told = service_error(400, "AuthorizationHeaderMalformed", fields="<Region>eu-west-3</Region>")
    async with asking(told, hello()) as (service, asked):
        assert bytes((await service.get(ReadRequest("a"))).data) == b"hello"
        await service.get(ReadRequest("a"))
    regions = [each.headers["authorization"].split("/")[2] for each in asked]
    assert regions == ["us-east-1", "eu-west-3", "eu-west-3"]


async def test_a_head_learns_the_region_from_a_header() -> None:
    told = answer(400, x_amz_bucket_region="eu-west-3")
    async with asking(told, hello(content_length="5")[: -len(b"hello")]) as (service, asked):
        assert (await service.head("a")).size == 5
    assert asked[1].headers["authorization"].split("/")[2] == "eu-west-3"


async def test_a_region_that_is_no_help_is_an_error() -> None:
    told = service_error(400, "AuthorizationHeaderMalformed", fields="<Region>us-east-1</Region>")
    async with asking(told) as (service, asked):
        with pytest.raises(StorageError, match="AuthorizationHeaderMalformed"):
            await service.get(ReadRequest("a"))
    assert len(asked) == 1


class SenderToAWS(S3Sender):
    """Sends to a scripted server in the place of AWS, with no region configured."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._server, self._endpoint_url = Origin.from_url(self._endpoint_url), ""

    def endpoint_in(self, region: str) -> Endpoint:
        return Endpoint(self._server, f"/{self._bucket}".encode(), region)


class ServiceOfAWS(S3Service):
    sender_class = SenderToAWS


@pytest.fixture
def no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("status", AMBIGUOUS)
@pytest.mark.usefixtures("no_region")
async def test_a_region_is_not_guessed_while_the_answer_may_come(status: int) -> None:
    """Nor may the write have been done that waits for the region: it was not sent."""
    told = answer(200, x_amz_bucket_region="eu-west-3")
    async with asking(answer(status), told, hello(), kind=ServiceOfAWS) as (service, asked):
        with pytest.raises(TransientError) as error:
            await service.put(WriteRequest("a"), [b"hello"], crc32c=None)
        assert not error.value.maybe_done
        await service.put(WriteRequest("a"), [b"hello"], crc32c=None)
    assert [each.method for each in asked] == ["HEAD", "HEAD", "PUT"]
    assert asked[2].headers["authorization"].split("/")[2] == "eu-west-3"


@pytest.mark.parametrize(
    ("told", "region"),
    [
        (answer(200, x_amz_bucket_region="eu-central-1"), "eu-central-1"),
        (answer(301, x_amz_bucket_region="eu-north-1"), "eu-north-1"),
        (answer(403, x_amz_bucket_region="ap-south-1"), "ap-south-1"),
        (answer(403), "us-east-1"),
    ],
)
@pytest.mark.usefixtures("no_region")
async def test_the_region_of_a_bucket_on_aws_is_looked_up(told: bytes, region: str) -> None:
    """Without keys, once, and of AWS itself."""
    async with asking(told, hello(), kind=ServiceOfAWS) as (service, asked):
        await service.get(ReadRequest("a"))
        await service.get(ReadRequest("a"))
    assert [each.method for each in asked] == ["HEAD", "GET", "GET"]
    assert "authorization" not in asked[0].headers
    assert asked[1].headers["authorization"].split("/")[2] == region


async def test_keys_that_have_ended_are_replaced() -> None:
    given = iter([Credentials("old", "s"), Credentials("new", "s")])
    current = [next(given)]

    def provider() -> Credentials:
        return current[0]

    def ended(_: Asked) -> bytes:
        current[0] = next(given)
        return service_error(400, "ExpiredToken")

    access = S3Access(credentials=provider)
    async with asking(ended, hello(), access=access) as (service, asked):
        await service.get(ReadRequest("a"))
    ids = [each.headers["authorization"].split("Credential=")[1].split("/")[0] for each in asked]
    assert ids == ["old", "new"]


async def test_keys_that_stay_ended_are_an_error() -> None:
    async with asking(service_error(403, "ExpiredToken")) as (service, asked):
        with pytest.raises(PermissionDeniedError, match="aws sso login"):
            await service.get(ReadRequest("a"))
    assert 2 <= len(asked) <= 4


async def test_a_clock_that_is_wrong_is_set_by_the_service() -> None:
    ahead = email.utils.formatdate(time.time() + 7200, usegmt=True)
    told = service_error(403, "RequestTimeTooSkewed", date=ahead)
    async with asking(told, hello()) as (service, asked):
        await service.get(ReadRequest("a"))
    first, second = (each.headers["x-amz-date"] for each in asked)
    assert 7000 <= _seconds(second) - _seconds(first) <= 7300


def _seconds(stamp: str) -> float:
    return time.mktime(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))


async def test_who_is_anonymous_signs_nothing() -> None:
    async with asking(hello(), access=S3Access(anonymous=True)) as (service, asked):
        await service.get(ReadRequest("a"))
    assert not {"authorization", "x-amz-date"} & asked[0].headers.keys()


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_every_request_says_that_the_requester_pays(operation: str) -> None:
    access = S3Access(credentials=Credentials("AKID", "s"), requester_pays=True)
    async with asking(hello(), access=access) as (service, asked):
        with suppress(AiofluxError):
            await OPERATIONS[operation](service)
    assert {each.headers.get("x-amz-request-payer") for each in asked} == {"requester"}
    assert all(";x-amz-request-payer" in each.headers["authorization"] for each in asked)


async def test_no_keys_name_what_needed_them() -> None:
    access = S3Access(credentials=lambda: None)
    async with asking(hello(), access=access) as (service, _):
        with pytest.raises(CredentialsError, match="could not read s3://bucket/p/a"):
            await service.get(ReadRequest("a"))


async def test_a_body_over_plain_http_is_signed() -> None:
    async with asking(answer(200, etag='"x"')) as (service, asked):
        await service.put(WriteRequest("a"), [b"hello"], crc32c=None)
        await service.put(WriteRequest("a"), [b"x" * 300_000], crc32c=None)
    assert asked[0].headers["x-amz-content-sha256"].startswith("2cf24dba5fb0a30e26e83b2ac5b9e29e")
    assert len(asked[1].headers["x-amz-content-sha256"]) == 64


# --- reads -------------------------------------------------------------------------------------


async def test_a_read_is_pinned_by_its_entity_tag() -> None:
    async with asking(hello(x_amz_checksum_crc32c=CRC32C)) as (service, asked):
        body = await service.get(ReadRequest("a", generation=PIN, start=0, end=5))
    assert asked[0].headers["if-match"] == f'"{ETAG}"'
    assert "range" not in asked[0].headers  # for only of the whole a checksum is told
    assert (body.generation, body.size, body.crc32c) == (PIN, 5, 0x9A71BB4C)


async def test_a_version_is_read_by_its_id() -> None:
    async with asking(hello()) as (service, asked):
        await service.get(ReadRequest("a", generation="version:a.b"))
    assert asked[0].target == "/bucket/p/a?versionId=a.b"
    assert "if-match" not in asked[0].headers


async def test_an_object_that_was_replaced_is_not_found() -> None:
    async with asking(service_error(412, "PreconditionFailed")) as (service, _):
        with pytest.raises(NotFoundError, match=f"replaced .* generation {PIN}"):
            await service.get(ReadRequest("a", generation=PIN))
        with pytest.raises(NotFoundError):
            await service.head("a", generation=PIN)


async def test_an_answer_of_another_content_is_refused() -> None:
    """From a cache that does not know conditions."""
    async with asking(hello()) as (service, _):
        with pytest.raises(StorageError, match="has the ETag"):
            await service.get(ReadRequest("a", generation="abc/5"))
        with pytest.raises(StorageError, match="the object has 5 bytes now, not 6"):
            await service.get(ReadRequest("a", generation=f"{ETAG}/6"))


@pytest.mark.parametrize("generation", ['a"b', "a\nb", "ü"])
async def test_a_generation_that_is_none_is_refused(generation: str) -> None:
    async with asking(hello()) as (service, asked):
        with pytest.raises(ValueError, match="not a generation of S3"):
            await service.get(ReadRequest("a", generation=generation))
    assert not asked


async def test_bytes_that_do_not_match_the_entity_tag_are_requested_again() -> None:
    async with asking(answer(200, b"hellO", etag=f'"{ETAG}"')) as (service, _):
        with pytest.raises(TransientError, match="do not match the checksum") as raised:
            await service.get(ReadRequest("a"))
    error = raised.value
    assert (error.is_damaged, error.num_bytes_received, error.generation) == (True, 5, "")


@pytest.mark.parametrize(
    "headers",
    [
        {"x_amz_checksum_crc32": "NhCmhg=="},
        {"x_amz_checksum_sha1": "qvTGHdzF6KLavt4PO0gs2a6pQ00="},
        {"x_amz_checksum_sha256": "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ="},
        {},
    ],
)
async def test_other_checksums_vouch_for_bytes(headers: dict[str, str]) -> None:
    async with asking(hello(**headers), answer(200, b"hellO", etag='"x"', **headers)) as (
        service,
        _,
    ):
        assert (await service.get(ReadRequest("a"))).crc32c == 0x9A71BB4C
        if headers:
            with pytest.raises(TransientError, match="do not match"):
                await service.get(ReadRequest("a"))


@pytest.mark.parametrize(
    "headers",
    [
        {"etag": f'"{ETAG}-2"'},
        {"etag": f'"{ETAG}"', "x_amz_server_side_encryption": "aws:kms"},
        {"etag": f'"{ETAG}-2"', "x_amz_checksum_crc32c": f"{CRC32C}-2"},
        {"etag": '"x"', "x_amz_checksum_crc32c": CRC32C, "x_amz_checksum_type": "COMPOSITE"},
        {"etag": '"x"', "x_amz_checksum_sha256": "AAAA-3"},
    ],
)
async def test_what_is_no_checksum_of_the_bytes_is_not_taken_for_one(
    headers: dict[str, str],
) -> None:
    async with asking(answer(200, b"other", **headers)) as (service, _):
        assert (await service.get(ReadRequest("a"))).crc32c is None


async def test_a_range_past_the_end_is_empty() -> None:
    past = service_error(416, "InvalidRange", fields="<ActualObjectSize>5</ActualObjectSize>")
    async with asking(past) as (service, _):
        body = await service.get(ReadRequest("a", start=7, end=9))
    assert (bytes(body.data), body.size) == (b"", 5)


async def test_a_range_past_the_end_that_reports_no_size_is_looked_at() -> None:
    looked = hello(content_length="5")[: -len(b"hello")]
    async with asking(service_error(416, "InvalidRange"), looked) as (service, asked):
        assert (await service.get(ReadRequest("a", start=7, end=9))).size == 5
    assert asked[1].method == "HEAD"


async def test_a_read_by_name_that_guessed_too_little_asks_for_a_range() -> None:
    part = answer(206, b"hel", etag=f'"{ETAG}"', content_range="bytes 0-2/5")
    async with asking(hello(), part) as (service, asked):
        body = await service.get(ReadRequest("a", start=0, end=3))
        assert (bytes(body.data), body.size) == (b"hel", 5)
        await service.get(ReadRequest("a", start=0, end=3))
    assert [each.headers.get("range") for each in asked] == [None, *["bytes=0-2"] * 2]


# --- writes ------------------------------------------------------------------------------------


async def test_conditions_travel_as_headers() -> None:
    async with asking(answer(200, etag='"x"')) as (service, asked):
        await service.put(WriteRequest("a", Precondition(if_absent=True)), [b""], crc32c=None)
        await service.put(WriteRequest("a", Precondition(if_generation_match=PIN)), [b""], crc32c=0)
    assert asked[0].headers["if-none-match"] == "*"
    assert asked[1].headers["if-match"] == f'"{ETAG}"'
    assert asked[1].headers["x-amz-checksum-crc32c"] == "AAAAAA=="


@pytest.mark.parametrize(
    ("status", "code"), [(412, "PreconditionFailed"), (404, "NoSuchKey"), (404, "")]
)
async def test_a_condition_that_does_not_hold(status: int, code: str) -> None:
    """AWS says 404 where there is nothing to replace."""
    wanted = Precondition(if_generation_match=PIN)
    async with asking(service_error(status, code)) as (service, _):
        with pytest.raises(PreconditionFailedError):
            await service.put(WriteRequest("a", wanted), [b""], crc32c=None)


async def test_a_conflict_is_retried_but_not_for_a_completion() -> None:
    """A completion that met one has lost its upload."""
    conflict = service_error(409, "ConditionalRequestConflict")
    absent = Precondition(if_absent=True)
    async with asking(conflict, answer(404), conflict) as (service, _):
        with pytest.raises(TransientError):
            await service.put(WriteRequest("a", absent), [b""], crc32c=None)
        with pytest.raises(PreconditionFailedError):
            await service.complete_upload(WriteRequest("a", absent), "id", [])


async def test_a_version_is_no_condition() -> None:
    wanted = Precondition(if_generation_match="version:x")
    async with asking(hello()) as (service, _):
        with pytest.raises(ValueError, match="S3 compares ETags"):
            await service.put(WriteRequest("a", wanted), [b""], crc32c=None)


@pytest.mark.parametrize("code", ["BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest"])
async def test_bytes_that_arrived_wrong_are_a_checksum_error(code: str) -> None:
    async with asking(service_error(400, code)) as (service, _):
        with pytest.raises(ChecksumError):
            await service.put(WriteRequest("a"), [b"1"], crc32c=1)


@pytest.mark.parametrize(
    ("code", "status", "maybe_done"),
    [
        ("InternalError", 500, True),
        ("SlowDown", 503, True),
        ("ConditionalRequestConflict", 409, False),
    ],
)
async def test_an_error_in_a_success_is_an_error(
    code: str, status: int, *, maybe_done: bool
) -> None:
    """A completion and a copy begin their answer before they are done."""
    failed = service_error(200, code)
    looked = hello(content_length="5")[: -len(b"hello")]
    async with asking(failed) as (service, _):
        with pytest.raises(TransientError) as error:
            await service.complete_upload(WriteRequest("a"), "id", [])
    assert (error.value.status, error.value.maybe_done) == (status, maybe_done)
    async with asking(looked, failed) as (service, _):
        with pytest.raises(TransientError) as error:
            await service.copy(Source(key="a"), "b", precondition=ANY)
    assert error.value.status == status


async def test_an_upload_has_one_checksum_of_all_its_parts() -> None:
    begun = answer(200, "<R><UploadId>u/1</UploadId></R>")
    part = answer(200, etag='"e"', x_amz_checksum_crc32c=CRC32C)
    done = answer(
        200,
        f"<R><ETag>&quot;e-2&quot;</ETag><ChecksumCRC32C>{CRC32C}</ChecksumCRC32C>"
        "<ChecksumType>FULL_OBJECT</ChecksumType></R>",
    )
    async with asking(begun, part, done) as (service, asked):
        request = WriteRequest(
            "a", attributes=ObjectAttributes(content_type="t/t", metadata={"k": "v"})
        )
        upload_id = await service.initiate_upload(request)
        sent = await service.put_part(PartRequest("a", upload_id, 1, [b"hello"], crc32c=0x9A71BB4C))
        meta = await service.complete_upload(request, upload_id, [sent])
    assert asked[0].target == "/bucket/p/a?uploads="
    assert asked[0].headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert asked[1].target == "/bucket/p/a?partNumber=1&uploadId=u%2F1"
    assert asked[2].headers["x-amz-checksum-crc32c"] == CRC32C
    assert (meta.etag, meta.size, meta.generation) == ("e-2", 5, "e-2/5")
    assert (meta.content_type, dict(meta.metadata), meta.crc32c) == ("t/t", {"k": "v"}, 0x9A71BB4C)


async def test_no_checksums_are_sent_to_who_does_not_know_them() -> None:
    access = S3Access(credentials=Credentials("AKID", "s"), checksums=False)
    part = UploadedPart(1, '"e"', 5, 0x9A71BB4C)
    async with asking(answer(200, "<R><ETag>x</ETag></R>", etag='"x"'), access=access) as (
        service,
        asked,
    ):
        await service.put(WriteRequest("a"), [b"he", b"llo"], crc32c=0x9A71BB4C)
        await service.put_part(PartRequest("a", "id", 1, [b"hello"], crc32c=0x9A71BB4C))
        await service.complete_upload(WriteRequest("a"), "id", [part])
    assert not any("x-amz-checksum-crc32c" in each.headers for each in asked)
    wrong = hello(x_amz_checksum_crc32c="AAAAAA==")
    async with asking(wrong, wrong[: -len(b"hello")], access=access) as (service, _):
        assert (await service.get(ReadRequest("a"))).crc32c == 0x9A71BB4C  # by the MD5
        assert (await service.head("a")).crc32c is None


async def test_a_large_object_is_copied_by_parts() -> None:
    gib = 1024**3
    attributes = {
        "content-type": "text/csv",
        "content-encoding": "gzip",
        "content-disposition": "inline",
        "cache-control": "max-age=60",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-meta-label": "cat",
    }
    looked = answer(200, content_length=f"{6 * gib}", etag='"e"', **attributes)

    def reply(asked: Asked) -> bytes:
        if asked.method == "HEAD":
            return looked
        if "uploads=" in asked.target:
            return answer(200, "<R><UploadId>u</UploadId></R>")
        return answer(200, "<R><ETag>&quot;p&quot;</ETag></R>")

    async with asking(reply) as (service, asked):
        meta = await service.copy(Source(key="a"), "b", precondition=ANY)
    copies = [each for each in asked if "x-amz-copy-source-range" in each.headers]
    assert len(copies) == 12
    assert {each.headers["x-amz-copy-source"] for each in copies} == {"/bucket/p/a"}
    assert all(each.headers["x-amz-copy-source-if-match"] == '"e"' for each in copies)
    assert meta.size == 6 * gib
    [begun] = [each for each in asked if "uploads=" in each.target]
    assert {name: begun.headers[name] for name in attributes} == attributes
    assert (meta.content_encoding, meta.storage_class) == ("gzip", "STANDARD_IA")


async def test_a_copy_by_parts_that_fails_leaves_no_upload() -> None:
    def reply(asked: Asked) -> bytes:
        if asked.method == "HEAD":
            return answer(200, content_length=f"{6 * 1024**3}", etag='"e"')
        if "uploads=" in asked.target:
            return answer(200, "<R><UploadId>u</UploadId></R>")
        return answer(204) if asked.method == "DELETE" else service_error(403, "AccessDenied")

    async with asking(reply) as (service, asked):
        with pytest.raises(PermissionDeniedError):
            await service.copy(Source(key="a"), "b", precondition=ANY)
    assert asked[-1].method == "DELETE"
    assert asked[-1].target.endswith("?uploadId=u")


@pytest.mark.parametrize("is_large", [False, True], ids=["whole", "by parts"])
@pytest.mark.parametrize("precondition", [ANY, Precondition(if_absent=True)], ids=["any", "new"])
async def test_a_named_source_that_is_replaced_before_it_is_copied_is_copied_anew(
    precondition: Precondition, *, is_large: bool
) -> None:
    """Of a pinned one, and of a target that is there, the caller is told."""
    size = 6 * 1024**3 if is_large else 5

    def reply(asked: Asked) -> bytes:
        if asked.method == "HEAD" and asked.target.endswith("/b"):
            return answer(404)
        if asked.method == "HEAD":
            is_pinned = "if-match" in asked.headers
            return answer(412) if is_pinned else answer(200, content_length=f"{size}", etag='"e"')
        if "uploads=" in asked.target:
            return answer(200, "<R><UploadId>u</UploadId></R>")
        return answer(204) if asked.method == "DELETE" else service_error(412, "PreconditionFailed")

    async with asking(reply) as (service, _):
        with pytest.raises(
            TransientError, match="p/a: it was replaced or deleted during the copy"
        ) as error:
            await service.copy(Source(key="a"), "b", precondition=precondition)
        assert not error.value.maybe_done

    def pinned(asked: Asked) -> bytes:
        is_first = asked.method == "HEAD" and len(calls) == 1
        return answer(200, content_length="5", etag='"e"') if is_first else reply(asked)

    async with asking(pinned) as (service, calls):
        with pytest.raises(NotFoundError):
            await service.copy(Source(key="a", generation="e/5"), "b", precondition=precondition)


async def test_what_s3_cannot_do_is_refused() -> None:
    async with asking(hello()) as (service, asked):
        with pytest.raises(StorageError, match="does not concatenate"):
            await service.compose(WriteRequest("a"), [Source(key="b")])
    assert not asked


async def test_a_closed_service_says_so() -> None:
    async with asking(hello()) as (service, _):
        await service.aclose()
        with pytest.raises(StorageError, match="the store was closed"):
            await service.get(ReadRequest("a"))


# --- many at once ------------------------------------------------------------------------------


async def test_one_request_deletes_many_and_reports_each_that_stays() -> None:
    told = (
        "<DeleteResult><Error><Key>p/b</Key><Code>AccessDenied</Code></Error>"
        "<Error><Key>p/c&amp;</Key><Code>SlowDown</Code></Error>"
        "<Error><Key>p/d</Key><Code>PreconditionFailed</Code></Error>"
        "<Deleted><Key>p/a</Key></Deleted></DeleteResult>"
    )
    sources = [Source(key=key, generation=PIN) for key in ("a", "b", "c&", "d")]
    async with asking(answer(200, told)) as (service, asked):
        failed = await service.delete_page(sources)
    assert {key: type(error) for key, error in failed.items()} == {
        "b": PermissionDeniedError,
        "c&": TransientError,
        "d": PreconditionFailedError,
    }
    assert failed["b"].uri == "s3://bucket/p/b"
    assert asked[0].target == "/bucket?delete="
    assert asked[0].headers["content-md5"]
    assert f"<Object><Key>p/c&amp;</Key><ETag>{ETAG}</ETag></Object>".encode() in asked[0].body


async def test_a_name_that_xml_cannot_hold_is_deleted_by_itself() -> None:
    async with asking(answer(204), answer(200, "<DeleteResult/>")) as (service, asked):
        sources = [Source(key=key, generation=PIN) for key in ("a\x01", "b")]
        assert await service.delete_page(sources) == {}
    assert [each.method for each in asked] == ["DELETE", "POST"]
    assert asked[0].target == "/bucket/p/a%01"


async def test_a_deletion_that_failed_under_another_name_is_not_one_that_was_done() -> None:
    told = "<DeleteResult><Error><Key>q%2Fb</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    async with asking(answer(200, told)) as (service, _):
        with pytest.raises(TransientError, match="AccessDenied for 'q%2Fb'") as error:
            await service.delete_page([Source(key="b", generation=PIN)])
    assert error.value.maybe_done


async def test_a_request_that_deletes_many_is_given_time() -> None:
    """It is answered when all are deleted: given up before, it is sent again and again."""
    given: list[float] = []
    async with asking(answer(200, "<DeleteResult/>")) as (service, _):
        send = service._sender.send

        async def sending(*asked: Any, head_seconds: float | None = None, **how: Any) -> Any:
            given.append(head_seconds or 0.0)
            return await send(*asked, head_seconds=head_seconds, **how)

        service._sender.send = sending  # type: ignore[method-assign]
        assert await service.delete_page([Source(key="a", generation=PIN)]) == {}
    assert given[0] >= 30
    assert len(given) == 1


async def test_names_with_ends_of_lines_are_names_of_s3() -> None:
    """They are listed, and one of them kept all others of a request from being deleted."""
    async with asking(answer(200, "<DeleteResult/>")) as (service, asked):
        sources = [Source(key=key, generation=PIN) for key in ("a\nb", "a\rb", "c")]
        assert await service.delete_page(sources) == {}
    assert b"<Key>p/a&#10;b</Key>" in asked[0].body
    assert b"<Key>p/a&#13;b</Key>" in asked[0].body


@pytest.mark.parametrize("operation", ["head", "get", "put", "delete", "initiate"])
async def test_names_that_are_too_long_are_refused(operation: str) -> None:
    def renamed(key: str) -> str:
        return key * 1023

    async with asking(hello()) as (service, asked):
        path = service._path
        service._path = lambda key: path(renamed(key))  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="1025 bytes of UTF-8, not 1 to 1024"):
            await OPERATIONS[operation](service)
    assert not asked


async def test_a_profile_may_tell_an_endpoint_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranges from there nothing vouches for the bytes."""
    async with asking(hello()) as (other, _):
        url = other._sender._endpoint_url
        config = tmp_path / "config"
        config.write_text(
            f"[profile w]\nendpoint_url = {url}\nregion = us-east-1\n"
            "aws_access_key_id = AKID\naws_secret_access_key = hush\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        service = open_service("s3://bucket/p/", credentials=S3Access(profile="w"))
        assert not service.capabilities.guarded_transport
        await service.get(ReadRequest("a"))
        assert not service.capabilities.guarded_transport
        await service.aclose()


@pytest.mark.parametrize("body", ["", "<Error><Code>SlowDown</Code></Error>", "<x/>"])
async def test_a_response_that_reports_nothing_of_deletions_is_requested_again(body: str) -> None:
    async with asking(answer(200, body)) as (service, _):
        with pytest.raises(TransientError) as error:
            await service.delete_page([Source(key="a")])
    assert error.value.maybe_done


def listed(*names: str, token: str = "", prefixes: tuple[str, ...] = (), **headers: str) -> bytes:
    rows = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
        f"<ETag>&quot;{ETAG}&quot;</ETag><Size>5</Size><StorageClass>STANDARD</StorageClass>"
        "</Contents>"
        for name in names
    )
    rows += "".join(
        f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in prefixes
    )
    more = "true" if token else "false"
    rows += f"<IsTruncated>{more}</IsTruncated><EncodingType>url</EncodingType>"
    if token:
        rows += f"<NextContinuationToken>{token}</NextContinuationToken>"
    return answer(200, f"<ListBucketResult>{rows}</ListBucketResult>", **headers)


async def test_a_listing_goes_on_by_token() -> None:
    async with asking(listed("p/a", "p/b%2Bc+d", token="t/1"), listed("p/c")) as (service, asked):
        first = await service.list_page(ListRequest(""))
        second = await service.list_page(ListRequest("", page_token=first.next_token))
    assert [meta.key for meta in first.objects] == ["a", "b+c d"]
    assert [meta.generation for meta in first.objects] == [PIN] * 2
    assert first.objects[0].updated is not None
    assert ([meta.key for meta in second.objects], second.next_token) == (["c"], "")
    assert "continuation-token=t%2F1" in asked[1].target


async def test_a_listing_begins_at_a_key_and_ends_before_one() -> None:
    """S3 leaves out the key that it is told, and knows no end."""
    async with asking(listed("p/b", "p/bz", "p/c", "p/d", token="t")) as (service, asked):
        page = await service.list_page(ListRequest("", start_offset="bz", end_offset="d"))
    assert "start-after=p%2Fby%F4%8F%BF%BD" in asked[0].target
    assert [meta.key for meta in page.objects] == ["bz", "c"]
    assert page.next_token == ""


async def test_a_listing_out_of_order_is_read_whole_and_sorted() -> None:
    """As SeaweedFS lists what is in a directory before what only begins with its name."""
    pages = listed("p/a/1", "p/a/2", token="t"), listed("p/a-b", "p/b")
    for server in ("SeaweedFS 4", "other"):
        swapped = (listed("p/a/2", "p/a/1", token="t"), pages[1]) if server == "other" else pages
        first, last = (
            page.replace(
                b"HTTP/1.1 200 Such\r\n", f"HTTP/1.1 200 Such\r\nserver: {server}\r\n".encode()
            )
            for page in swapped
        )

        def reply(asked: Asked, first: bytes = first, last: bytes = last) -> bytes:
            return last if "continuation-token" in asked.target else first

        async with asking(reply) as (service, _):
            page = await service.list_page(ListRequest("", page_size=3))
            assert [meta.key for meta in page.objects] == ["a-b", "a/1", "a/2"]
            rest = await service.list_page(ListRequest("", page_token=page.next_token, page_size=3))
            assert ([meta.key for meta in rest.objects], rest.next_token) == (["b"], "")
            # Also where what was left is forgotten.
            again = await service.list_page(
                ListRequest("", page_token=page.next_token, page_size=3)
            )
            assert [meta.key for meta in again.objects] == ["b"]
            part = await service.list_page(ListRequest("", start_offset="a/", end_offset="b"))
            assert [meta.key for meta in part.objects] == ["a/1", "a/2"]


async def test_a_listing_out_of_order_is_cut_before_it_is_paged() -> None:
    """A page that begins a range and holds nothing of it would look like one that comes twice."""
    pages = listed("p/b", "p/a", "p/c", token="t"), listed("p/d", "p/e")

    def reply(asked: Asked) -> bytes:
        return pages["continuation-token" in asked.target]

    async with asking(reply) as (service, _):
        assert service.capabilities.list_ranges
        page = await service.list_page(ListRequest("", start_offset="c", page_size=2))
        assert [meta.key for meta in page.objects] == ["c", "d"]
        assert not service.capabilities.list_ranges
        rest = await service.list_page(ListRequest("", page_token=page.next_token, page_size=2))
    assert [meta.key for meta in rest.objects] == ["e"]


async def test_a_listing_out_of_order_of_several_pages_is_whole() -> None:
    """The first of its pages may already have been cut into ranges."""
    names = [f"p/{number:05}" for number in range(4500)]
    size = 1000

    def reply(asked: Asked) -> bytes:
        token = asked.target.partition("continuation-token=")[2].partition("&")[0]
        at = int(token or 0)
        token = f"{at + size}" if at + size < len(names) else ""
        page = names[at : at + size]
        return listed(page[1], page[0], *page[2:], token=token)

    async with asking(reply) as (service, asked):
        url = service._sender._endpoint_url
        async with open_store("s3://bucket/p/", endpoint_url=url, credentials=KEYS) as store:
            found = await store.list_all()
    assert [f"p/{meta.key}" for meta in found] == names
    assert len(asked) <= 6


@pytest.mark.parametrize("again", ["1", "2"])
async def test_a_token_that_comes_again_does_not_end_a_listing_in_silence(again: str) -> None:
    def reply(asked: Asked) -> bytes:
        token = asked.target.partition("continuation-token=")[2].partition("&")[0]
        return listed("p/b", "p/a", token={"": "1", "1": "2", "2": again}[token])

    async with asking(reply) as (service, asked):
        with pytest.raises(StorageError, match=r"could not list s3://bucket/p/.* previous page"):
            await asyncio.wait_for(service.list_page(ListRequest("")), timeout=100)
    assert len(asked) <= 4


async def test_an_upload_whose_key_xml_cannot_hold_keeps_no_other_from_being_found() -> None:
    def reply(asked: Asked) -> bytes:
        is_encoded = "encoding-type=url" in asked.target
        row = (
            f"<Upload><Key>p/a{'%01' if is_encoded else '&#x1;'}+</Key><UploadId>i</UploadId>"
            "<Initiated>2026-01-02T03:04:05Z</Initiated></Upload>"
        )
        told = "<EncodingType>url</EncodingType>" if is_encoded else ""
        return answer(200, f"<ListMultipartUploadsResult>{told}{row}</ListMultipartUploadsResult>")

    async with asking(reply) as (service, asked):
        [upload] = await service.list_uploads("")
    assert upload.key == "a\x01 "
    assert len(asked) == 2


async def test_keys_that_come_late_sign_for_no_region_that_was_left() -> None:
    """Kept, such a signature would be refused for ever: the region told is the one in use."""
    begun: list[Any] = []

    async def late() -> tuple[str, str]:
        begun[0]._sender._set_region("eu-west-3")
        return "AKID", "s"

    async with asking(hello(), access=S3Access(credentials=late)) as (service, asked):
        begun.append(service)
        await service.get(ReadRequest("a"))
        await service.get(ReadRequest("a"))
    assert ["/eu-west-3/" in each.headers["authorization"] for each in asked] == [False, True]


LARGE = (
    "<Contents><Key>p/a</Key><LastModified></LastModified><ETag>x</ETag>"
    f"<Size>{'9' * 30}</Size></Contents>"
)
LARGE_IN_OTHER_ORDER = f"<Contents><Size>{'9' * 30}</Size><Key>p/a</Key></Contents>"


def endless(asked: Asked) -> bytes:
    """A page that holds nothing, and names a next page that was not before."""
    token = asked.target.partition("continuation-token=")[2].partition("&")[0]
    return listed(token=f"{int(token or 0) + 1}", server="SeaweedFS 4")


async def test_a_listing_that_is_sorted_here_ends_after_many_empty_pages() -> None:
    async with asking(endless) as (service, asked):
        with pytest.raises(StorageError, match=r"could not list s3://bucket/p/.*empty pages"):
            await service.list_page(ListRequest(""))
    assert len(asked) <= 2 + MAX_EMPTY_PAGES


@pytest.mark.more
async def test_a_listing_of_uploads_ends_after_many_empty_pages() -> None:
    def reply(asked: Asked) -> bytes:
        marker = f"<NextKeyMarker>{len(seen)}</NextKeyMarker>"
        seen.append(asked)
        rows = f"<IsTruncated>true</IsTruncated>{marker}"
        return answer(200, f"<ListMultipartUploadsResult>{rows}</ListMultipartUploadsResult>")

    seen: list[Asked] = []
    async with asking(reply) as (service, _):
        with pytest.raises(StorageError, match="empty pages"):
            await service.list_uploads("")
    assert len(seen) == MAX_EMPTY_PAGES


async def test_one_level_is_listed_by_prefixes() -> None:
    async with asking(listed("p/a", prefixes=("p/b%2F", "p/c%2F"))) as (service, asked):
        page = await service.list_page(ListRequest("", delimiter="/"))
    assert page.prefixes == ["b/", "c/"]
    assert "delimiter=%2F" in asked[0].target


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html/>",
        "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        "<ListBucketResult><IsTruncated>false</IsTrun",
        f"<ListBucketResult>{LARGE}<IsTruncated>false</IsTruncated></ListBucketResult>",
        f"<ListBucketResult>{LARGE_IN_OTHER_ORDER}</ListBucketResult>",
    ],
)
async def test_a_damaged_page_is_requested_again(body: str) -> None:
    async with asking(answer(200, body)) as (service, _):
        with pytest.raises(TransientError, match="not a listing"):
            await service.list_page(ListRequest(""))


async def test_a_page_of_something_else_is_an_error() -> None:
    async with asking(listed("other/a")) as (service, _):
        with pytest.raises(StorageError, match="returned a wrong page"):
            await service.list_page(ListRequest(""))
