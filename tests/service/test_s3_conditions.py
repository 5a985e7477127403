"""Conditions on S3: which spelling of an ETag is sent, and what is trusted without a look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    RetryPolicy,
    S3Access,
    TransientError,
    UnsupportedError,
)
from aioflux._services.base import Precondition, WriteRequest
from aioflux._services.s3.endpoint import is_amazon
from tests.servers.process_state import forget_servers
from tests.service.opening import open_service
from tests.service.s3_rig import PIN, Asked, Cut, Probed, answer, asking, hello, service_error

if TYPE_CHECKING:
    from aioflux._services.base import Service

MATCH = Precondition(if_generation_match=PIN)
REFUSED = service_error(412, "PreconditionFailed")
SAME = hello(content_length="5")[: -len(b"hello")]
OTHER = answer(200, etag='"other"', content_length="5")
KEYS = S3Access(credentials=lambda: ("AKID", "s"))
SOON = RetryPolicy(max_attempts=4, initial_seconds=1e-3, max_seconds=2e-3)


@pytest.fixture(autouse=True)
def _forget() -> None:
    forget_servers()


def opened(service: Service) -> aioflux.Store:
    url = service._sender._endpoint_url
    return aioflux.open_store("s3://bucket/p/", endpoint_url=url, credentials=KEYS, retry=SOON)


async def put(service: Service, precondition: Precondition = MATCH) -> None:
    await service.put(WriteRequest("a", precondition), [b"1"], crc32c=None)


async def test_a_correct_etag_that_is_refused_is_sent_without_quotes() -> None:
    """Ceph compares it so. The spelling is remembered for the endpoint."""
    stored = answer(200, etag='"new"')
    async with asking(REFUSED, SAME, stored) as (service, asked):
        await put(service)
        await put(service)
    assert [each.method for each in asked] == ["PUT", "HEAD", "PUT", "PUT"]
    etag = PIN.partition("/")[0]
    told = [each.headers["if-match"] for each in asked if each.method == "PUT"]
    assert told == [f'"{etag}"', etag, etag]


async def test_the_spelling_is_changed_back() -> None:
    """Such as after an update of the server."""
    stored = answer(200, etag='"new"')
    async with asking(REFUSED, SAME, stored, REFUSED, SAME, stored) as (service, asked):
        await put(service)
        await put(service)
        await put(service)
    quoted = [each.headers["if-match"].startswith('"') for each in asked if each.method == "PUT"]
    assert quoted == [True, False, False, True, True]


@pytest.mark.parametrize("found", [OTHER, answer(404)], ids=["replaced", "gone"])
async def test_an_etag_that_is_not_the_objects_is_sent_once(found: bytes) -> None:
    async with asking(REFUSED, found) as (service, asked):
        with pytest.raises(PreconditionFailedError):
            await put(service)
    assert [each.method for each in asked] == ["PUT", "HEAD"]


async def test_a_look_that_fails_leaves_nothing_open() -> None:
    """The write itself was refused: it cannot have been done."""
    async with asking(REFUSED, service_error(500, "InternalError")) as (service, _):
        with pytest.raises(TransientError) as failure:
            await put(service)
    assert not failure.value.maybe_done


async def test_a_write_in_the_other_spelling_whose_answer_was_lost_is_found() -> None:
    """It was carried out, so that the next attempt meets an object that is not the old one."""
    stored = answer(200, etag=f'"{PIN.partition("/")[0]}"', content_length="5")
    there = stored.replace(b"\r\n\r\n", b"\r\nx-amz-checksum-crc32c: mnG7TA==\r\n\r\n")
    answers = (REFUSED, OTHER, Cut(b""), REFUSED, there, there)
    async with asking(*answers) as (service, asked), opened(service) as store:
        meta = await store.put("a", b"hello", if_generation_match="other/5")
    assert meta.generation == PIN
    assert [each.method for each in asked] == ["PUT", "HEAD", "PUT", "PUT", "HEAD", "HEAD"]


async def test_a_conditional_delete_is_spelled_alike() -> None:
    async with asking(REFUSED, SAME, answer(204)) as (service, asked):
        await service.delete("a", generation=PIN)
    assert [each.method for each in asked] == ["DELETE", "HEAD", "DELETE"]
    assert asked[2].headers["if-match"] == PIN.partition("/")[0]


async def test_a_pinned_head_notices_a_server_that_ignores_the_pin() -> None:
    async with asking(OTHER) as (service, _):
        with pytest.raises(NotFoundError, match="replaced since it was listed"):
            await service.head("a", generation=PIN)


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        ("", True),
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("https://bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("https://s3.eusc-de-east-1.amazonaws.eu", True),
        ("https://amazonaws.com.example.org", False),
        ("https://notamazonaws.com", False),
        ("http://127.0.0.1:9000", False),
    ],
)
async def test_aws_alone_is_trusted(url: str, trusted: bool) -> None:
    """Nothing is sent to find out, and no delete is preceded by a look."""
    assert is_amazon(url) == trusted
    service = open_service("s3://bucket", credentials=KEYS, endpoint_url=url)
    assert bool(await service.unprobed_server()) != trusted
    assert service.conditions_known == trusted
    assert await service.has_conditional_delete() == trusted
    assert await service.has_conditional_delete(in_pages=True) == trusted
    await service.aclose()


class Refusing(Probed):
    """Refuses the first request of a probe."""

    def answer(self, asked: Asked) -> bytes:
        if not self.num_requests:
            self.num_requests += 1
            return service_error(403, "AccessDenied")
        return super().answer(asked)


async def test_a_probe_that_fails_is_repeated_by_the_next_write() -> None:
    probed = Refusing()
    async with (
        asking(answer(200, etag='"x"'), probed=probed) as (service, _),
        opened(service) as store,
    ):
        with pytest.raises(PermissionDeniedError):
            await store.put("a", b"1", mode="create")
        await store.put("a", b"1", mode="create")
        num_requests = probed.num_requests
        await store.put("b", b"1", mode="create")
    assert probed.num_requests == num_requests > 1
    assert probed.etags == {}


class Rejecting(Probed):
    """Knows no conditional header, as servers that answer 501 to it."""

    def answer(self, asked: Asked) -> bytes:
        if asked.headers.keys() & {"if-match", "if-none-match"}:
            return service_error(501, "NotImplemented")
        return super().answer(asked)


async def test_a_server_that_refuses_the_header_is_unsupported_too() -> None:
    probed = Rejecting()
    async with (
        asking(answer(200, etag='"x"'), probed=probed) as (service, asked),
        opened(service) as store,
    ):
        with pytest.raises(UnsupportedError, match="If-None-Match"):
            await store.put("a", b"1", mode="create")
        with pytest.raises(UnsupportedError, match="If-Match"):
            await store.put("a", b"1", if_generation_match=PIN)
        await store.put("a", b"1")
    assert [each.method for each in asked] == ["PUT"]
    assert probed.etags == {}


class Busy(Probed):
    """Answers 429 to every second write of a key, before or after it was done.

    Cloudflare R2 takes one write of a key in a second.
    """

    def __init__(self, *, is_done: bool) -> None:
        super().__init__()
        self._is_done = is_done
        self._num_writes: dict[str, int] = {}

    def answer(self, asked: Asked) -> bytes:
        if asked.method != "PUT":
            return super().answer(asked)
        number = self._num_writes[asked.target] = self._num_writes.get(asked.target, 0) + 1
        if number % 2:
            return super().answer(asked)
        if self._is_done:
            super().answer(asked)
        return service_error(429, "TooManyRequests")


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "done"])
async def test_a_probe_goes_on_where_it_was_throttled(is_done: bool) -> None:
    """And is not led astray by what an attempt did before it was answered so."""
    probed = Busy(is_done=is_done)
    async with (
        asking(answer(200, etag='"x"'), probed=probed) as (service, _),
        opened(service) as store,
    ):
        assert await store.check_conditions() == []
    assert probed.etags == {}
    assert len(probed._num_writes) == 1
