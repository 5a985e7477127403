"""Objects in memory: what the suite of stores does not ask of a service."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux import ChecksumError, NotFoundError, PreconditionFailedError
from aioflux._services.base import ListRequest, PartRequest, Precondition, ReadRequest, WriteRequest
from aioflux.testing import GCSServer
from tests.service.opening import open_service

if TYPE_CHECKING:
    from aioflux._services.base import Service

ANY = Precondition()


@pytest.fixture
def service() -> Service:
    return open_service(f"memory://{uuid.uuid4().hex}/p/")


async def test_wrong_bytes_are_refused(service: Service) -> None:
    with pytest.raises(ChecksumError, match="p/a"):
        await service.put(WriteRequest("a"), [b"1"], crc32c=0)
    upload = await service.initiate_upload(WriteRequest("a"))
    with pytest.raises(ChecksumError, match="p/a"):
        await service.put_part(PartRequest("a", upload, 1, (b"1",), crc32c=0))
    with pytest.raises(NotFoundError):
        await service.head("a")


async def test_an_upload_belongs_to_its_key(service: Service) -> None:
    upload = await service.initiate_upload(WriteRequest("a"))
    with pytest.raises(NotFoundError, match="no upload"):
        await service.put_part(PartRequest("b", upload, 1, (b"1",)))
    [found] = await service.list_uploads("")
    assert (found.key, found.upload_id) == ("a", upload)
    assert abs((datetime.now(UTC) - found.initiated).total_seconds()) < 60
    assert await service.list_uploads("b") == []


async def test_a_condition_of_a_completion_is_judged(service: Service) -> None:
    await service.put(WriteRequest("a"), [b"old"], crc32c=None)
    upload = await service.initiate_upload(WriteRequest("a"))
    part = await service.put_part(PartRequest("a", upload, 1, (b"1",)))
    with pytest.raises(PreconditionFailedError):
        await service.complete_upload(
            WriteRequest("a", Precondition(if_absent=True)), upload, [part]
        )
    assert bytes((await service.get(ReadRequest("a"))).data) == b"old"


async def test_a_delimiter_groups_keys_over_pages(service: Service) -> None:
    for key in ("a", "b/1", "b/2", "c/d/e", "f", "g/h"):
        await service.put(WriteRequest(key), [b""], crc32c=None)
    names: list[str] = []
    token = ""
    while True:
        page = await service.list_page(
            ListRequest("", delimiter="/", page_token=token, page_size=2)
        )
        names += [meta.key for meta in page.objects] + list(page.prefixes)
        token = page.next_token
        if not token:
            break
    assert sorted(names) == ["a", "b/", "c/", "f", "g/"]


async def test_a_listing_starts_and_ends_at_its_offsets(service: Service) -> None:
    for at in range(10):
        await service.put(WriteRequest(f"d{at}"), [b""], crc32c=None)
    page = await service.list_page(ListRequest("d", start_offset="d3", end_offset="d6"))
    assert [meta.key for meta in page.objects] == ["d3", "d4", "d5"]


REFUSED = [
    ".",
    "..",
    "a\nb",
    "a\rb",
    "k" * 1025,
    "\u00e9" * 513,
    ".well-known/acme-challenge/x",
    "\ud800",
]


@pytest.mark.parametrize("key", REFUSED)
async def test_both_services_refuse_the_same_names(key: str) -> None:
    """Before anything is sent: a program that is tested in memory meets no surprise later."""
    with GCSServer(buckets=("bucket",)) as server:
        async with (
            aioflux.open_store("gs://bucket", endpoint_url=server.url) as cloud,
            aioflux.open_store(f"memory://{uuid.uuid4().hex}") as memory,
        ):
            for store in (cloud, memory):
                await store.put("a", b"1")
                for call in (
                    store.put(key, b"1"),
                    store.put(key, b"1", mode="create"),
                    store.compose(key, ["a"]),
                    store.copy("a", key),
                    store.get(key),
                    store.head(key),
                    store.delete(key),
                ):
                    with pytest.raises(ValueError):  # noqa: PT011  Python words one of them
                        await call
                assert [meta.key for meta in await store.list_all()] == ["a"]


async def test_a_name_is_judged_whole() -> None:
    """With the store's prefix: a dot below it is a name like another."""
    service = open_service(f"memory://{uuid.uuid4().hex}/p/")
    for key in ("..", ".", "k" * 1022, ".well-known/acme-challenge/x"):
        await service.put(WriteRequest(key), [b"1"], crc32c=None)
    with pytest.raises(ValueError, match="1025 bytes"):
        await service.put(WriteRequest("k" * 1023), [b"1"], crc32c=None)
