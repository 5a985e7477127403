"""Google Cloud Storage, one request at a time: what is sent, and what answers mean."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from aioflux import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)
from aioflux._services.base import (
    ListRequest,
    PartRequest,
    Precondition,
    ReadRequest,
    Source,
    WriteRequest,
)
from aioflux._values.meta import ObjectAttributes
from aioflux.testing import GCSServer
from tests.http.scripted import Peer, serving
from tests.service.gcs_rig import ANY, OPERATIONS, Answering, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "p/a", b"0123456789")
        yield running


each_operation = pytest.mark.parametrize("operation", OPERATIONS)


@each_operation
async def test_a_busy_service_is_retried_when_it_says(server: GCSServer, operation: str) -> None:
    async with opened(server.url) as service:
        with (
            server.faults.inject("*", status=503, retry_after=7),
            pytest.raises(TransientError, match=r"gs://bucket/p/.*503") as raised,
        ):
            await OPERATIONS[operation](service)
    assert raised.value.retry_after_seconds == 7.0
    assert raised.value.status == 503


@each_operation
async def test_what_is_forbidden_is_not_asked_again(server: GCSServer, operation: str) -> None:
    async with opened(server.url) as service:
        with (
            server.faults.inject("*", status=403),
            pytest.raises(PermissionDeniedError, match="credentials"),
        ):
            await OPERATIONS[operation](service)


@each_operation
async def test_a_connection_that_ends_is_retried(server: GCSServer, operation: str) -> None:
    async with opened(server.url) as service:
        with (
            server.faults.inject("*", reset=True),
            pytest.raises(TransientError, match="gs://bucket/p/"),
        ):
            await OPERATIONS[operation](service)


@each_operation
async def test_a_server_that_is_not_there_is_retried(operation: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with opened(url) as service:
            with pytest.raises(TransientError, match="gs://bucket/p/"):
                await OPERATIONS[operation](service)


GARBLED = {
    name: call
    for name, call in OPERATIONS.items()
    if name in {"head", "list", "compose", "copy", "initiate", "complete", "list_uploads"}
}


@pytest.mark.parametrize("operation", GARBLED)
@pytest.mark.parametrize("body", [b"<html>", b"{}", b"<Error><Code>Oops</Code></Error>"])
async def test_a_response_that_says_something_else_is_retried(operation: str, body: bytes) -> None:
    async with answering(body) as url, opened(url) as service:
        with pytest.raises(TransientError, match="gs://bucket/p/"):
            await GARBLED[operation](service)


@asynccontextmanager
async def answering(body: bytes, *head: str) -> AsyncIterator[str]:
    """A server that has one answer for everything."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *head, "", ""]
    answer = "\r\n".join(lines).encode() + body

    async def script(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(answer)

    async with serving(script) as (_, origin):
        yield f"http://127.0.0.1:{origin.port}"


async def test_a_service_that_ignores_a_range_is_not_believed() -> None:
    told = "x-goog-generation: 7"
    async with answering(b"0123456789", told) as url, opened(url) as service:
        assert bytes((await service.get(ReadRequest("a", start=0, end=100))).data) == b"0123456789"
        with pytest.raises(StorageError, match="over the 2 bytes"):
            await service.get(ReadRequest("a", start=5, end=7))
        with pytest.raises(StorageError, match="ignored the range"):
            await service.get(ReadRequest("a", start=5, end=20))


async def test_a_range_past_the_end_is_empty(server: GCSServer) -> None:
    async with opened(server.url) as service:
        body = await service.get(ReadRequest("a", start=10, end=20))
        assert (bytes(body.data), body.size) == (b"", 10)


async def test_a_body_reports_what_it_is_a_part_of(server: GCSServer) -> None:
    async with opened(server.url) as service:
        head = await service.head("a")
        body = await service.get(ReadRequest("a", start=2, end=5))
        assert bytes(body.data) == b"234"
        assert (body.size, body.generation, body.crc32c) == (10, head.generation, head.crc32c)
        assert body.meta().key == "a"
        memory = bytearray(10)
        into = await service.get(ReadRequest("a"), into=memoryview(memory))
        assert (memory, into.size) == (b"0123456789", 10)


async def test_bytes_that_arrive_wrong_are_refused_by_the_service(server: GCSServer) -> None:
    async with opened(server.url) as service:
        with pytest.raises(ChecksumError, match="other bytes"):
            await service.put(WriteRequest("b"), [b"1"], crc32c=0)
        with pytest.raises(NotFoundError):
            await service.head("b")


async def test_uploads_are_listed_below_the_prefix(server: GCSServer) -> None:
    async with opened(server.url) as service:
        ids = [await service.initiate_upload(WriteRequest(f"up/{at}&<é")) for at in range(3)]
        found = await service.list_uploads("up/")
        assert [(upload.key, upload.upload_id) for upload in found] == [
            (f"up/{at}&<é", upload_id) for at, upload_id in enumerate(ids)
        ]
        assert all(abs(datetime.now(UTC) - each.initiated).total_seconds() < 60 for each in found)
        assert await service.list_uploads("other") == []
        for at, upload_id in enumerate(ids):
            await service.abort_upload(f"up/{at}&<é", upload_id)
            await service.abort_upload(f"up/{at}&<é", upload_id)
        assert await service.list_uploads("") == []


async def test_completing_twice_is_not_found(server: GCSServer) -> None:
    async with opened(server.url) as service:
        request = WriteRequest("b", attributes=ObjectAttributes(content_type="text/csv"))
        upload_id = await service.initiate_upload(request)
        part = await service.put_part(PartRequest("b", upload_id, 1, (b"ab", b"c")))
        meta = await service.complete_upload(request, upload_id, [part])
        assert (meta.size, meta.generation) == (3, (await service.head("b")).generation)
        with pytest.raises(NotFoundError, match="NoSuchUpload"):
            await service.complete_upload(WriteRequest("b"), upload_id, [part])


@each_operation
@pytest.mark.parametrize("token", [None, "a-token"])
async def test_both_planes_send_the_same_token(
    server: GCSServer, operation: str, token: str | None
) -> None:
    headers = Answering()
    server.app.hooks += (headers,)
    settings = {"credentials": lambda: token} if token else {}
    async with opened(server.url, **settings) as service:
        with suppress(NotFoundError):
            await OPERATIONS[operation](service)
    assert set(headers.tokens) == {token and f"Bearer {token}"}


PAGES = {
    "unsorted": b'{"kind":"storage#objects","items":[{"name":"p/b"},{"name":"p/a"}]}',
    "elsewhere": b'{"kind":"storage#objects","items":[{"name":"q/a"}]}',
    "again": b'{"kind":"storage#objects","nextPageToken":"token"}',
}


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_that_was_not_requested_is_an_error(page: str) -> None:
    async with answering(PAGES[page]) as url, opened(url) as service:
        with pytest.raises(
            StorageError, match=r"could not list gs://bucket/p/: the service returned a wrong page"
        ) as caught:
            await service.list_page(ListRequest("", page_token="token"))
    assert not isinstance(caught.value, TransientError)


DAMAGED = {
    "size": b'{"kind":"storage#objects","items":[{"name":"p/a","size":"x"}]}',
    "30 digits": b'{"kind":"storage#objects","items":[{"name":"p/a","size":"%s"}]}' % (b"9" * 30),
    "crc32c": b'{"kind":"storage#objects","items":[{"name":"p/a","crc32c":"!"}]}',
    "json": b'{"kind":"storage#objects","items":[{"name":"p',
    "utf-8": b'{"kind":"storage#objects","items":[{"name":"p/\xff"}]}',
    "kind": b'{"kind":"storage#buckets"}',
    "error": b'{"error":{"code":503}}',
}


@pytest.mark.parametrize("page", DAMAGED)
async def test_a_damaged_page_is_requested_again(page: str) -> None:
    async with answering(DAMAGED[page]) as url, opened(url) as service:
        with pytest.raises(TransientError, match="gs://bucket/p/"):
            await service.list_page(ListRequest(""))


@pytest.mark.parametrize(
    "body",
    [b'{"name":"p/other","generation":"7"}', b'{"name":"p/a","generation":"8"}'],
    ids=["name", "generation"],
)
async def test_metadata_of_another_object_is_an_error(body: bytes) -> None:
    async with answering(body) as url, opened(url) as service:
        with pytest.raises(StorageError, match="the response is for") as caught:
            await service.head("a", generation="7")
    assert not isinstance(caught.value, TransientError)


@pytest.mark.parametrize(
    "body",
    [
        b'{"name":"p/a","size":"x"}',
        b'{"name":"p/a","size":"%s"}' % (b"9" * 30),
        b'{"name":"p/a","crc32c":"AAAA"}',
    ],
)
async def test_damaged_metadata_is_requested_again(body: bytes) -> None:
    async with answering(body) as url, opened(url) as service:
        with pytest.raises(TransientError, match="gs://bucket/p/a"):
            await service.head("a")


@pytest.mark.parametrize("operation", ["put", "put_part"])
async def test_a_damaged_answer_to_a_write_leaves_open_what_was_done(operation: str) -> None:
    told = "x-goog-hash: crc32c=AAAA\r\netag: x"
    async with answering(b"", told) as url, opened(url) as service:
        with pytest.raises(TransientError, match="gs://bucket/p/b") as caught:
            await OPERATIONS[operation](service)
    assert caught.value.maybe_done


@each_operation
async def test_a_page_that_stands_in_for_every_answer_is_not_believed(operation: str) -> None:
    """Such as that of a network which wants its guests to sign in: HTTP 200, some HTML."""
    async with (
        answering(b"<html>Welcome</html>", "content-type: text/html") as url,
        opened(url) as service,
    ):
        with pytest.raises(StorageError, match="gs://bucket/p/"):
            await OPERATIONS[operation](service)


@each_operation
async def test_a_closed_service_says_so(server: GCSServer, operation: str) -> None:
    async with opened(server.url) as service:
        await service.aclose()
        with pytest.raises(StorageError, match="the store was closed"):
            await OPERATIONS[operation](service)


async def test_a_copy_is_of_the_generation_that_was_seen(server: GCSServer) -> None:
    async with opened(server.url) as service:
        seen = (await service.head("a")).generation
        meta = await service.copy(Source(key="a", generation=seen), "b", precondition=ANY)
        assert (meta.key, meta.size) == ("b", 10)
        with pytest.raises(NotFoundError):
            await service.copy(Source(key="a", generation="1"), "b", precondition=ANY)
        with pytest.raises(
            PreconditionFailedError, match=r"to gs://bucket/p/b: the generation of the target"
        ):
            await service.copy(Source(key="a"), "b", precondition=Precondition(if_absent=True))


async def test_a_composite_has_the_requested_fields(server: GCSServer) -> None:
    async with opened(server.url) as service:
        await service.compose(
            WriteRequest(
                "c", attributes=ObjectAttributes(content_type="text/csv", metadata={"rows": "1"})
            ),
            [Source(key="a")],
        )
        head = await service.head("c")
    assert (head.content_type, dict(head.metadata)) == ("text/csv", {"rows": "1"})
