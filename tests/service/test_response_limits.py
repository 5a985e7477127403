"""No response takes more memory than its kind may, however large, endless or compressed it is."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import PermissionDeniedError, S3Access, StorageError, TransientError
from aioflux._services.base import ListRequest
from tests.http.scripted import Peer, answering, ok, serving
from tests.service.opening import opened_service
from tests.service.operations import ALL, operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

MIB = 1024 * 1024
MAX_METADATA_BYTES = MIB
MAX_PAGE_BYTES = 64 * MIB
LIMIT = rf"{MAX_METADATA_BYTES} bytes allowed"
UNLIMITED = ("get", "small_read", "list", "list_uploads", "delete_page")
"""Operations whose responses have a limit of another kind."""
SERVICES: dict[str, tuple[str, Any]] = {
    "gs": ("gs://bucket/p/", "anonymous"),
    "s3": ("s3://bucket/p/", S3Access(anonymous=True)),
    "az": ("az://account/container/p/", "anonymous"),
}
HEADS = {"s3": ("head", "delete"), "az": ("head",)}
"""Operations that send only HEAD, or HEAD first: their responses have no body."""
OTHERS = {
    "gs": ("delete_page",),
    "s3": ("compose", "copy", "permissions"),
    "az": ("compose", "copy", "permissions", "initiate", "abort"),
}
"""Operations that the service does not have, or for which it first sends a HEAD."""
CALLS = [
    (scheme, name)
    for scheme in SERVICES
    for name in operations(*UNLIMITED, *OTHERS[scheme], *HEADS.get(scheme, ()))
]
each_call = pytest.mark.parametrize(("scheme", "operation"), CALLS)


def opened(scheme: str, port: int) -> AbstractAsyncContextManager[Any]:
    uri, credentials = SERVICES[scheme]
    return opened_service(uri, credentials=credentials, endpoint_url=f"http://127.0.0.1:{port}")


class Endless:
    """Sends a body without an end, in chunks, until the client closes the connection."""

    def __init__(self, status: bytes) -> None:
        self._num_sent = 0
        self._closed = asyncio.Event()
        self._head = b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\n\r\n" % status

    async def script(self, peer: Peer) -> None:
        await peer.read_request()
        await peer.send(self._head)
        try:
            while self._num_sent < 256 * MIB:
                await peer.send(b"10000\r\n%b\r\n" % (b"x" * 0x10000))
                self._num_sent += 0x10000
        except ConnectionError:
            self._closed.set()

    async def check_closed(self) -> None:
        """Check that the client closed the connection soon; sockets have buffers of some MiB."""
        async with asyncio.timeout(30):
            await self._closed.wait()
        assert self._num_sent < 32 * MIB


@each_call
async def test_an_endless_success_is_an_error_that_names_the_limit(
    scheme: str, operation: str
) -> None:
    endless = Endless(b"200 OK")
    async with serving(endless.script) as (_, origin), opened(scheme, origin.port) as service:
        with pytest.raises(TransientError, match=LIMIT) as caught:
            await ALL[operation](service)
        await endless.check_closed()
    assert caught.value.is_malformed


@each_call
async def test_a_success_that_announces_too_much_is_an_error_that_names_the_limit(
    scheme: str, operation: str
) -> None:
    large = ok(b"x" * (MAX_METADATA_BYTES + 1))
    async with serving(answering(large)) as (_, origin), opened(scheme, origin.port) as service:
        with pytest.raises(TransientError, match=LIMIT) as caught:
            await ALL[operation](service)
    assert caught.value.is_malformed


@each_call
async def test_an_endless_error_is_the_error_of_its_status(scheme: str, operation: str) -> None:
    endless = Endless(b"403 Forbidden")
    async with serving(endless.script) as (_, origin), opened(scheme, origin.port) as service:
        with pytest.raises(PermissionDeniedError) as caught:
            await ALL[operation](service)
        await endless.check_closed()
    assert caught.value.status == 403
    assert len(str(caught.value)) < 1000


@pytest.fixture(scope="module")
def compressed() -> bytes:
    """64 KiB that become 64 MiB."""
    import gcloud.aio.storage  # noqa: F401  # not while memory is measured

    return gzip.compress(b'{"error": {"message": "' + b"0" * 64 * MIB, 9)


@pytest.mark.parametrize("status", [b"200 OK", b"403 Forbidden"], ids=["200", "403"])
@each_call
async def test_a_compressed_body_is_not_decompressed(
    scheme: str, operation: str, status: bytes, compressed: bytes
) -> None:
    """No request asks for compression."""
    response = ok(compressed, b"Content-Encoding: gzip", status=status)
    async with serving(answering(response)) as (_, origin), opened(scheme, origin.port) as service:
        with peak_below(8 * MIB), pytest.raises(StorageError):
            await ALL[operation](service)


@contextmanager
def peak_below(num_bytes: int) -> Iterator[None]:
    """Check that the block allocates less than this at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < num_bytes


NUM = 2_100_000
S3 = b"<ListBucketResult>%b<IsTruncated>false</IsTruncated></ListBucketResult>"
AZ = b"<EnumerationResults><Blobs>%b</Blobs><NextMarker/></EnumerationResults>"
GS = b'{"kind":"storage#objects",%b}'
PAGES = {
    "gs-objects": (
        "gs",
        lambda: GS % (b'"items":[%b]' % b",".join([b'{"name":"a"}'] * (NUM // 4))),
    ),
    "gs-prefixes": ("gs", lambda: GS % (b'"prefixes":[%b]' % b",".join([b'"a/"'] * NUM))),
    "gs-metadata": (
        "gs",
        lambda: (
            GS
            % (
                b'"items":[{"name":"a","metadata":{%b}}]'
                % b",".join(b'"%07d":""' % number for number in range(NUM))
            )
        ),
    ),
    "s3-elements": ("s3", lambda: S3 % (b"<a/>" * NUM)),
    "s3-objects": ("s3", lambda: S3 % (b"<Contents><Size>1</Size></Contents>" * (NUM // 20))),
    "s3-prefixes": ("s3", lambda: S3 % (b"<CommonPrefixes><Prefix/></CommonPrefixes>" * NUM)),
    "az-nested": ("az", lambda: AZ % (b"<a>" * NUM + b"</a>" * NUM)),
    "az-blobs": ("az", lambda: AZ % (b"<Blob><Name>a</Name></Blob>" * (NUM // 20))),
    "az-prefixes": ("az", lambda: AZ % (b"<BlobPrefix><Name>a/</Name></BlobPrefix>" * NUM)),
}
"""Pages that would take hundreds of megabytes of memory once they are parsed."""


@pytest.mark.parametrize(("scheme", "page"), PAGES.values(), ids=PAGES)
async def test_a_page_of_too_many_entries_is_malformed(
    scheme: str, page: Callable[[], bytes]
) -> None:
    body = page()
    async with serving(answering(ok(body))) as (_, origin), opened(scheme, origin.port) as service:
        # The body, a copy of it in the server's transport or while it is searched, and the parsed
        # part of it.
        with (
            peak_below(3 * len(body) + 64 * MIB),
            pytest.raises(TransientError, match="could not list") as caught,
        ):
            await service.list_page(ListRequest(""))
    assert caught.value.is_malformed


@pytest.mark.parametrize("scheme", SERVICES)
async def test_a_page_may_be_larger_than_other_bodies_but_not_endless(scheme: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_PAGE_BYTES + 1)
    async with serving(answering(head)) as (_, origin), opened(scheme, origin.port) as service:
        with pytest.raises(TransientError, match=rf"the {MAX_PAGE_BYTES} bytes allowed"):
            await service.list_page(ListRequest(""))


@pytest.mark.parametrize("operation", ["head", "permissions", "compose", "copy", "list"])
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b'"text"', b"5"], ids=lambda body: body[:5]
)
async def test_json_of_another_form_is_malformed(operation: str, body: bytes) -> None:
    """Also JSON that is nested so deeply that parsers raise another error."""
    async with serving(answering(ok(body))) as (_, origin), opened("gs", origin.port) as service:
        with pytest.raises(TransientError, match="gs://bucket/p/") as caught:
            await ALL[operation](service)
    assert caught.value.is_malformed
