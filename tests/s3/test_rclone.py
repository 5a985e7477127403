"""A third server of S3, rclone's own: what it has works.

It knows no `If-None-Match`, no `If-Match` and no range of what it keeps in memory, and takes its
time over parts and over many objects: the store's contract is tested on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from botocore.credentials import Credentials

import aioflux
from aioflux import NotFoundError, PermissionDeniedError, RetryPolicy

if TYPE_CHECKING:
    from tests.servers.rclone import Rclone


def opened(rclone: Rclone, prefix: str, secret: str | None = None) -> aioflux.Store:
    keys = Credentials(rclone.access_key, secret or rclone.secret_key)
    return aioflux.open_store(
        f"s3://bucket/{prefix}/",
        endpoint_url=rclone.url,
        credentials=aioflux.S3Access(credentials=keys),
        retry=RetryPolicy(max_attempts=2, initial_seconds=1e-3),
    )


async def test_objects_come_back_are_listed_and_go(rclone: Rclone) -> None:
    objects = {f"{at:02}/50% a+b?x=1#é": b"data of %d" % at for at in range(2)} | {
        "empty": b"",
        "plain": b"1",
    }
    async with opened(rclone, "basic") as store:
        for key, data in objects.items():
            assert (await store.put(key, data)).size == len(data)
        assert [meta.key for meta in await store.list_all()] == sorted(objects)
        level = await store.list_all(delimiter="/")
        assert [meta.key for meta in level] == ["empty", "plain"]
        assert list(level.prefixes) == ["00/", "01/"]
        found = await store.list_all()
        assert dict([pair async for pair in store.get_many(found)]) == objects
        assert (await store.copy("plain", "copy")).size == 1
        assert await store.get("copy") == b"1"
        result = await store.delete_many(["copy", *objects])
        assert result.errors == {}
        with pytest.raises(NotFoundError):
            await store.head("copy")


async def test_what_another_client_wrote_is_read(rclone: Rclone) -> None:
    rclone.door().put_object(Bucket="bucket", Key="other/a", Body=b"1")
    async with opened(rclone, "other") as store:
        assert await store.get(await store.head("a")) == b"1"


async def test_keys_that_do_not_match_are_refused(rclone: Rclone) -> None:
    async with opened(rclone, "refused", "wrong") as store:
        with pytest.raises(PermissionDeniedError):
            await store.get("a")
