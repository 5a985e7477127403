"""An answer to a read is the bytes that were asked for, or an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux import NotFoundError, StorageError, TransientError
from aioflux._services.base import ReadRequest, WriteRequest
from aioflux._services.gcs.wire import object_size
from aioflux._services.responses import size_from_unsatisfied
from aioflux._values.meta import ObjectAttributes
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Response
from tests.http.scripted import answering, ok, serving
from tests.service.gcs_rig import OPERATIONS, Answering, opened
from tests.service.responses import response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from aioflux.testing.gcs_server import Request

PART = b"206 Partial Content"
LENGTH = b"x-goog-stored-content-length"


def size_of(status: int, headers: dict[bytes, bytes], num_bytes: int, **read: Any) -> int:
    return object_size(ReadRequest("a", **read), response(status, headers, num_bytes))


def told_size(status: int, headers: dict[bytes, bytes], num_bytes: int, **asked: Any) -> int:
    """What an answer of generation 7 tells, unless it says another."""
    return size_of(status, {b"x-goog-generation": b"7"} | headers, num_bytes, **asked)


def test_an_answer_without_a_generation_is_not_of_cloud_storage() -> None:
    with pytest.raises(ValueError, match="the response has no generation"):
        size_of(200, {}, 3, start=0, end=None, generation="")


@given(st.binary(max_size=30), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_the_part_that_was_requested_is_believed(
    data: bytes, start: int, length: int | None
) -> None:
    end = None if length is None else start + length
    part = data[start:end]
    if not part:
        return
    headers = {b"content-range": b"bytes %d-%d/%d" % (start, start + len(part) - 1, len(data))}
    if start or end is not None:
        size = told_size(206, headers, len(part), start=start, end=end, generation="")
        assert size == len(data)


@given(
    *[st.integers(0, 12)] * 4,
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(0, 12),
    st.sampled_from([200, 206]),
)
def test_no_other_part_is_believed(
    first: int, last: int, size: int, num_bytes: int, end: int | None, start: int, status: int
) -> None:
    if end is not None and end <= start:
        return
    headers = {b"content-range": b"bytes %d-%d/%d" % (first, last, size)} if status == 206 else {}
    try:
        told = told_size(status, headers, num_bytes, start=start, end=end, generation="")
    except ValueError:
        return
    wanted = range(start, told if end is None else min(end, told))
    # Some of the bytes that were asked for, from the first on; fewer are found by their number.
    got = range(first, last + 1) if status == 206 else range(num_bytes)
    assert len(got) == num_bytes
    assert got.start == wanted.start
    assert got.stop <= wanted.stop


ASKED = {"start": 2, "end": 5, "generation": "7"}
RIGHT = {b"content-range": b"bytes 2-4/10", b"x-goog-generation": b"7"}


@pytest.mark.parametrize(
    ("status", "headers", "num_bytes", "says"),
    [
        pytest.param(
            206, {b"content-range": b"bytes 3-5/10"}, 3, "is not the range from byte", id="start"
        ),
        pytest.param(
            206, {b"content-range": b"bytes 2-3/10"}, 3, "is not the range from byte", id="length"
        ),
        pytest.param(
            206,
            {b"content-range": b"bytes 2-5/10"},
            4,
            "is longer than the requested",
            id="too-long",
        ),
        pytest.param(
            206, {b"content-range": b"bytes 2-4/4"}, 3, "is not the range from byte", id="past-size"
        ),
        pytest.param(
            206, {b"content-range": b"bytes 2-4/*"}, 3, "not one range", id="unknown-size"
        ),
        pytest.param(206, {b"content-range": b"bytes */10"}, 3, "not one range", id="unsatisfied"),
        pytest.param(206, {b"content-range": b"items 2-4/10"}, 3, "not one range", id="other-unit"),
        pytest.param(
            206, {b"content-range": b"bytes 2-4/10, bytes 6-7/10"}, 3, "not one range", id="two"
        ),
        pytest.param(
            206,
            {b"content-type": b"multipart/byteranges; boundary=x"},
            3,
            "is not one range",
            id="multipart",
        ),
        pytest.param(200, {}, 3, "ignored the range", id="whole"),
        pytest.param(204, {}, 0, "HTTP 204", id="empty"),
        pytest.param(203, {}, 3, "HTTP 203", id="transformed"),
        pytest.param(206, RIGHT | {b"x-goog-generation": b"8"}, 3, "generation 8", id="generation"),
        pytest.param(206, RIGHT | {b"content-encoding": b"br"}, 3, "changed on", id="br"),
        pytest.param(
            206,
            RIGHT | {b"content-encoding": b"gzip", b"x-goog-stored-content-encoding": b"identity"},
            3,
            "stored as 'identity'",
            id="encoded-on-the-way",
        ),
        pytest.param(
            206,
            RIGHT | {b"x-goog-stored-content-encoding": b"gzip"},
            3,
            "stored as 'gzip'",
            id="decoded-on-the-way",
        ),
    ],
)
def test_another_answer_is_refused(
    status: int, headers: dict[bytes, bytes], num_bytes: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        told_size(status, headers, num_bytes, **ASKED)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (206, {b"content-range": b"bytes 0-2/3"}),
        (200, {b"x-goog-stored-content-length": b"30"}),
        (200, {b"x-goog-stored-content-length": b"x"}),
    ],
    ids=["part", "short", "no-length"],
)
def test_a_whole_object_is_whole(status: int, headers: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match=r"in place of the whole|of 3 bytes"):
        told_size(status, headers, 3, start=0, end=None, generation="")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"content-encoding": b"gzip", b"x-goog-stored-content-encoding": b"gzip"},
        {b"content-encoding": b"GZIP"},
        {b"content-encoding": b"identity", b"x-goog-stored-content-encoding": b"identity"},
        {b"x-goog-stored-content-encoding": b"identity"},
        {b"x-goog-generation": b"7"},
    ],
)
def test_stored_bytes_are_believed(headers: dict[bytes, bytes]) -> None:
    for end in (None, 3, 100):
        assert told_size(200, headers, 3, start=0, end=end, generation="7") == 3
    assert told_size(206, RIGHT | headers, 3, **ASKED) == 10


def test_the_stored_size_is_the_size_of_the_object() -> None:
    whole, part = {LENGTH: b"3"}, RIGHT | {LENGTH: b"10"}
    assert told_size(200, whole, 3, start=0, end=3, generation="7") == 3
    assert told_size(206, part, 3, **ASKED) == 10


@given(st.integers(0, 12), st.integers(1, 12), st.integers(0, 30), st.integers(0, 30))
def test_a_lowered_size_of_a_part_is_not_believed(
    start: int, length: int, total: int, stored: int
) -> None:
    """A proxy that shortens an object in Content-Range leaves the size that is stored."""
    num_bytes = min(length, total - start)
    if num_bytes < 1:
        return
    content_range = b"bytes %d-%d/%d" % (start, start + num_bytes - 1, total)
    headers = {b"content-range": content_range, LENGTH: b"%d" % stored}
    read = {"start": start, "end": start + length, "generation": ""}
    if total == stored:
        assert told_size(206, headers, num_bytes, **read) == total
    else:
        with pytest.raises(ValueError, match=f"but the object has {stored}"):
            told_size(206, headers, num_bytes, **read)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (b"bytes */10", 10),
        (b"bytes */0", 0),
        (b"bytes */20", 20),
        (b"bytes */21", None),
        (b"bytes 0-1/10", None),
        (b"", None),
        (b"10", None),
    ],
)
def test_a_416_is_believed_where_it_reports_a_size_that_explains_it(
    value: bytes, size: int | None
) -> None:
    assert size_from_unsatisfied({b"content-range": value}, start=20) == size
    assert size_from_unsatisfied({}, start=20) is None


# The same through a service.


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "p/a", b"0123456789")
        yield running


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(ok(b"345", b"Content-Range: bytes 3-5/10", status=PART), id="start"),
        pytest.param(ok(b"234", b"Content-Range: bytes 2-4/*", status=PART), id="unknown-size"),
        pytest.param(ok(b"01234"), id="whole"),
        pytest.param(
            ok(b"234", b"Content-Range: bytes 2-4/10", b"Content-Encoding: br", status=PART),
            id="br",
        ),
        pytest.param(
            ok(b"--x", b"Content-Type: multipart/byteranges; boundary=x", status=PART), id="parts"
        ),
        pytest.param(
            ok(b"234", b"Content-Range: bytes 2-4/10", b"x-goog-generation: 8", status=PART),
            id="generation",
        ),
    ],
)
@pytest.mark.parametrize("into", [False, True], ids=["own", "into"])
async def test_other_bytes_are_an_error_that_names_the_object(answer: bytes, into: bool) -> None:
    memory = memoryview(bytearray(3)) if into else None
    async with serving(answering(answer)) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url) as service:
            with pytest.raises(StorageError, match="gs://bucket/p/a") as caught:
                await service.get(ReadRequest("a", generation="7", start=2, end=5), into=memory)
    assert isinstance(caught.value, TransientError)
    assert caught.value.is_malformed
    assert not caught.value.generation, "no byte of it is kept"


async def test_a_service_that_ignores_ranges_does_not_fill_the_memory() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000\r\n\r\n"
    async with (
        serving(answering(head)) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        with pytest.raises(StorageError, match="over the 100 bytes"):
            await service.get(ReadRequest("a", start=0, end=100))


@pytest.mark.parametrize("read", ["get", "head", "get_range", "get_many"])
async def test_a_pinned_read_of_a_replaced_object_says_so(server: GCSServer, read: str) -> None:
    async with aioflux.open_store("gs://bucket/p", endpoint_url=server.url) as store:
        seen = await store.head("a")
        server.put("bucket", "p/a", b"another")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: store.get(seen),
            "head": lambda: store.head(seen),
            "get_range": lambda: store.get_range(seen, start=0, end=2),
            "get_many": lambda: anext(store.get_many([seen])),
        }
        says = rf"gs://bucket/p/a.* generation {seen.generation} .*replaced"
        with pytest.raises(NotFoundError, match=says):
            await calls[read]()


async def test_a_damaged_checksum_is_requested_again() -> None:
    answer = answering(ok(b"0123", b"x-goog-generation: 7\r\nx-goog-hash: crc32c=!!!!"))
    async with (
        serving(answer) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        with pytest.raises(TransientError, match="base64"):
            await service.get(ReadRequest("a"))


def unexplained(request: Request) -> Response | None:
    return Response(status=416) if request.headers.get("range") else None


async def test_a_416_that_explains_nothing_is_looked_into(server: GCSServer) -> None:
    server.app.hooks += (Answering(unexplained),)
    async with opened(server.url) as service:
        body = await service.get(ReadRequest("a", start=10, end=20))
        head = await service.head("a")
        assert (bytes(body.data), body.size, body.generation) == (b"", 10, head.generation)
        assert (body.crc32c, body.meta()) == (head.crc32c, head)
        with pytest.raises(TransientError, match="but the object has 10 bytes"):
            await service.get(ReadRequest("a", start=9, end=20))


async def test_a_416_without_a_range_is_an_error(server: GCSServer) -> None:
    told = (("Content-Range", "bytes */0"),)
    server.app.hooks += (Answering(lambda _: Response(status=416, headers=told)),)
    async with opened(server.url) as service:
        with pytest.raises(StorageError, match="HTTP 416"):
            await service.get(ReadRequest("a"))


async def test_metadata_that_comes_with_the_bytes_is_that_of_head(server: GCSServer) -> None:
    metadata = {"label": "cat 7", "place": "Zürich 100%"}
    async with opened(server.url) as service:
        await service.put(
            WriteRequest("b", attributes=ObjectAttributes(metadata=metadata)), [b"1"], crc32c=None
        )
        head = await service.head("b")
        meta = (await service.get(ReadRequest("b"))).meta()
        assert dict(head.metadata) == dict(meta.metadata) == metadata


async def test_an_empty_response_keeps_the_checksum_that_it_reports() -> None:
    """So that a body which was lost whole is not taken for an empty object."""
    answer = answering(ok(b"", b"x-goog-generation: 7\r\nx-goog-hash: crc32c=AAAAAQ=="))
    async with serving(answer) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url) as service:
            assert (await service.get(ReadRequest("a"))).crc32c == 1
        async with aioflux.open_store("gs://bucket", endpoint_url=url) as store:
            with pytest.raises(aioflux.ChecksumError, match="crc32c 0x00000000"):
                await store.get("a")


@pytest.mark.parametrize("operation", ["put", "delete", "list", "initiate"])
async def test_an_answer_longer_than_any_is_refused_and_not_allocated(operation: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n"
    async with (
        serving(answering(head)) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        with pytest.raises(StorageError, match="gs://bucket/p/"):
            await OPERATIONS[operation](service)


async def test_a_stalled_response_about_metadata_is_requested_again_soon(
    server: GCSServer,
) -> None:
    timeouts = aioflux.Timeouts(progress_seconds=0.3, idle_seconds=600.0)
    server.put("bucket", "stalled", b"1")
    async with aioflux.open_store(
        "gs://bucket", endpoint_url=server.url, timeouts=timeouts
    ) as store:
        with server.faults.inject("storage.objects.get", stall_at=0, times=1):
            async with asyncio.timeout(200):  # a third of what a write may wait for its answer
                assert (await store.head("stalled")).size == 1
        assert server.faults.injected["stall"] == 1
        assert store.stats.num_retries >= 1
