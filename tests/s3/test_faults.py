"""Lost answers, broken bodies and busy servers: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import pytest

import aioflux
from aioflux import RetryPolicy, S3Access, TransferOptions, TransientError
from tests.service.s3_rig import ETAG, PIN, Cut, answer, asking, hello, service_error

SOON = RetryPolicy(max_attempts=4, initial_seconds=1e-3, max_seconds=2e-3)
KEYS = S3Access(credentials=lambda: ("AKID", "s"))
CRC32C = "mnG7TA=="
"""Of `hello`."""


def opened(service: object, **settings: object) -> aioflux.Store:
    url = service._sender._endpoint_url  # type: ignore[attr-defined]
    return aioflux.open_store(
        "s3://bucket/p/",
        endpoint_url=url,
        credentials=KEYS,
        retry=SOON,
        **settings,  # type: ignore[arg-type]
    )


LOOKED = hello(content_length="5", x_amz_checksum_crc32c=CRC32C)[: -len(b"hello")]


async def test_a_body_that_breaks_off_is_gone_on_with() -> None:
    """Where it stopped, and in the same content."""
    broken = Cut(
        answer(206, b"he", etag=f'"{ETAG}"', content_range="bytes 0-4/5", content_length="5")
    )
    rest = answer(206, b"llo", etag=f'"{ETAG}"', content_range="bytes 2-4/5")
    async with asking(LOOKED, broken, rest) as (service, asked), opened(service) as store:
        meta = await store.head("a")
        data = bytearray(5)
        assert await store.get_into(meta, data) == 5
    assert bytes(data) == b"hello"
    assert asked[2].headers["range"] == "bytes=2-4"
    assert asked[2].headers["if-match"] == f'"{ETAG}"'


async def test_a_server_that_is_busy_is_waited_for() -> None:
    async with (
        asking(service_error(503, "SlowDown"), service_error(500, "InternalError"), hello()) as (
            service,
            asked,
        ),
        opened(service) as store,
    ):
        assert await store.get("a") == b"hello"
        assert store.stats.num_throttled == 1
    assert len(asked) == 3


async def test_a_server_that_stays_busy_ends_in_an_error() -> None:
    async with asking(service_error(503, "SlowDown")) as (service, asked), opened(service) as store:
        with pytest.raises(TransientError, match="gave up after 4 attempts"):
            await store.put("a", b"hello")
    assert len(asked) == 4


async def test_a_created_object_whose_answer_was_lost_is_found() -> None:
    """By what is there: the second attempt is refused because of the first."""
    async with (
        asking(Cut(b""), service_error(412, "PreconditionFailed"), LOOKED) as (service, asked),
        opened(service) as store,
    ):
        meta = await store.put("a", b"hello", mode="create")
    assert meta.generation == PIN
    assert [each.method for each in asked] == ["PUT", "PUT", "HEAD"]


async def test_a_completion_whose_answer_was_lost_is_found() -> None:
    data = bytes(6 * 1024 * 1024)
    size = len(data)

    def reply(asked: object) -> bytes:
        method, target = asked.method, asked.target  # type: ignore[attr-defined]
        if method == "POST" and "uploads=" in target:
            return answer(200, "<R><UploadId>u</UploadId></R>")
        if method == "PUT":
            return answer(200, etag='"p"')
        if method == "POST":
            return completions.pop(0)
        if method == "DELETE":
            return answer(204)
        return answer(
            200,
            content_length=f"{size}",
            etag='"whole-2"',
            x_amz_checksum_crc32c=checksum(data),
            x_amz_checksum_type="FULL_OBJECT",
        )

    completions = [service_error(500, "InternalError"), service_error(404, "NoSuchUpload")]
    small = TransferOptions(part_size_bytes=5 * 1024 * 1024, max_buffered_bytes=10 * 1024 * 1024)
    async with asking(reply) as (service, _), opened(service, transfer=small) as store:
        meta = await store.put("a", data)
    assert (meta.size, meta.generation) == (size, f"whole-2/{size}")


def checksum(data: bytes) -> str:
    import base64

    import google_crc32c

    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


async def test_wrong_bytes_are_read_again_and_reported_in_the_end() -> None:
    """With a crc32c as with an MD5."""
    wrong = answer(200, b"hellO", etag=f'"{ETAG}"', x_amz_checksum_crc32c=CRC32C)
    right = hello(x_amz_checksum_crc32c=CRC32C)
    async with asking(wrong, right) as (service, _), opened(service) as store:
        assert await store.get("a") == b"hello"
    async with asking(wrong) as (service, _), opened(service) as store:
        with pytest.raises(aioflux.ChecksumError):
            await store.get("a")


async def test_a_region_is_learned_by_reads_without_a_task() -> None:
    """They are asked again where the bucket turns out to be."""
    told = service_error(400, "AuthorizationHeaderMalformed", fields="<Region>eu-west-3</Region>")

    def reply(asked: object) -> bytes:
        is_there = "/eu-west-3/" in asked.headers["authorization"]  # type: ignore[attr-defined]
        return hello() if is_there else told

    async with asking(reply) as (service, _), opened(service) as store:
        keys = ["a"] * 20
        assert [data async for _, data in store.get_many(keys)] == [b"hello"] * 20
        session = store._sessions.current()
        sender = session.service._sender  # type: ignore[attr-defined]
        sender._set_region("us-east-1")  # as if the bucket had moved under reads that are under way
        assert [data async for _, data in store.get_many(keys)] == [b"hello"] * 20
        assert sender.endpoint.region == "eu-west-3"


async def test_reads_that_guess_too_little_at_the_same_time_all_look_again() -> None:
    """Each of them was told too late that objects are longer than was thought."""
    large = bytes(3 * 1024 * 1024)
    etag = '"large"'

    def reply(asked: object) -> bytes:
        target, headers = asked.target, asked.headers  # type: ignore[attr-defined]
        if asked.method == "HEAD":  # type: ignore[attr-defined]
            return answer(200, content_length=f"{len(large)}", etag=etag)
        if "small" in target:
            return hello()
        if "range" not in headers:
            return answer(200, large, etag=etag)
        first, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
        last = min(last, len(large) - 1)
        told = f"bytes {first}-{last}/{len(large)}"
        return answer(206, large[first : last + 1], etag=etag, content_range=told)

    async with asking(reply) as (service, _), opened(service) as store:
        warm = [key async for key, _ in store.get_many(["small"] * 20)]
        assert len(warm) == 20
        assert [len(data) async for _, data in store.get_many(["large"] * 6)] == [len(large)] * 6
