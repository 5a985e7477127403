"""Services whose listings and ranges tell no checksum, and those that delete many at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import ChecksumError, PermissionDeniedError, TransientError
from aioflux._services.base import Body, ListRequest, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux import StorageError
    from aioflux._services.base import Service, Source

KIB = 1024
OPTIONS = aioflux.TransferOptions(range_size_bytes=64 * KIB)
SOON = aioflux.RetryPolicy(initial_seconds=1e-4, max_seconds=1e-3)


async def as_s3(store: aioflux.Store, **declared: Any) -> Service:
    """Have the store's service declare more or less than it does, and tell less in listings."""
    service: Any = store._sessions.current().service
    service.capabilities = replace(service.capabilities, **declared)
    plain_get, plain_list = service.get, service.list_page

    async def get(request: ReadRequest, **settings: Any) -> Any:
        body = await plain_get(request, **settings)
        is_whole = not request.start and len(body.data) == body.size
        body.crc32c = body.crc32c if is_whole else None
        return body

    async def list_page(request: ListRequest) -> Any:
        page = await plain_list(request)
        return replace(page, objects=[replace(meta, crc32c=None) for meta in page.objects])

    service.get, service.list_page = get, list_page
    return service


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_large_object_is_compared_with_what_head_reports(*, guarded: bool) -> None:
    data = bytes(300 * KIB)
    async with aioflux.open_store("memory://told/a", transfer=OPTIONS) as store:
        await store.put("a", data)
        service: Any = await as_s3(store, listed_checksums=False, guarded_transport=guarded)
        [meta] = await store.list_all()
        assert await store.get(meta) == await store.get("a") == data
        plain = service.get

        async def flipped(request: ReadRequest, **settings: Any) -> Any:
            body = await plain(request, **settings)
            if request.start and body.data:
                memoryview(body.data)[0] = 1
            return body

        service.get = flipped
        for key in (meta, "a"):
            with pytest.raises(ChecksumError):
                await store.get(key)


@pytest.mark.parametrize("twice", [True, False])
async def test_a_small_object_without_any_checksum_is_read_twice_on_request(*, twice: bool) -> None:
    options = replace(OPTIONS, verify_ranges=twice)
    async with aioflux.open_store("memory://told/b", transfer=options) as store:
        meta = replace(await store.put("a", b"hello"), crc32c=None)
        service: Any = await as_s3(store, listed_checksums=False, guarded_transport=False)
        service = service.inner if twice else service
        plain, num_reads = service.get, 0

        async def without_checksum(request: ReadRequest, **settings: Any) -> Body:
            nonlocal num_reads
            num_reads += 1
            return replace(await plain(request, **settings), crc32c=None)

        service.get = without_checksum
        assert await store.get(meta) == b"hello"
        assert (num_reads > 1) is twice


async def deleting(
    store: aioflux.Store, fails: Mapping[str, StorageError], *, loses: int = 0
) -> list[int]:
    """Have the store's service delete by pages of ten; return how many were in each."""
    service: Any = store._sessions.current().service
    service.capabilities = replace(service.capabilities, delete_page_size=10)
    sizes: list[int] = []

    async def delete_page(sources: Sequence[Source]) -> Mapping[str, StorageError]:
        sizes.append(len(sources))
        failed: dict[str, StorageError] = {}
        for source in sources:
            try:
                if source.key in fails:
                    raise fails[source.key]
                await service.delete(source.key, generation=source.generation)
            except aioflux.StorageError as exc:
                failed[source.key] = exc
        if len(sizes) <= loses:
            raise TransientError("the answer was lost", maybe_done=True)
        return failed

    service.delete_page = delete_page
    return sizes


async def test_many_are_deleted_by_pages() -> None:
    keys = [f"{at:02}" for at in range(25)]
    async with aioflux.open_store("memory://told/c", retry=SOON) as store:
        for key in keys:
            await store.put(key, b"1")
        [replaced] = [meta for meta in await store.list_all() if meta.key == "03"]
        await store.put("03", b"2")
        fails = {"07": PermissionDeniedError("no"), "08": TransientError("busy")}
        sizes = await deleting(store, fails)
        doomed = [replaced, *(key for key in keys if key != "03"), "none"]
        result = await store.delete_many(doomed)
        assert set(result.errors) == {"03", "07"}
        assert result.missing == ("none",)
        assert result.deleted == tuple(key for key in keys if key not in {"03", "07"})
        assert sum(sizes) == 24
        assert [meta.key for meta in await store.list_all()] == ["03", "07"]


async def test_a_page_whose_answer_was_lost_was_deleted() -> None:
    """What the second attempt does not find, the first has deleted."""
    keys = [f"{at:02}" for at in range(10)]
    async with aioflux.open_store("memory://told/d", retry=SOON) as store:
        for key in keys:
            await store.put(key, b"1")
        sizes = await deleting(store, {}, loses=1)
        result = await store.delete_many(keys)
        assert (result.deleted, result.missing) == (tuple(keys), ())
        assert sizes == [10, 10]


async def test_few_and_those_far_apart_are_deleted_one_by_one() -> None:
    async with aioflux.open_store("memory://told/e", retry=SOON) as store:
        for at in range(10):
            await store.put(f"{at}", b"1")
        sizes = await deleting(store, {})
        assert (await store.delete_many(["1", "2"])).deleted == ("1", "2")
        service: Any = store._sessions.current().service
        plain = service.list_page

        async def endless(request: ListRequest) -> Any:
            return replace(await plain(ListRequest(request.prefix)), next_token="more")

        service.list_page = endless
        rest = [f"{at}" for at in range(10) if at not in {1, 2}]
        assert (await store.delete_many(rest)).deleted == tuple(rest)
        assert sizes == []
