"""The write of a commit object: the first of two stays, and what it replaced is deleted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux import CheckpointError
from aioflux.checkpoint._store.commit import commit
from aioflux.checkpoint._store.commits import read_commits
from tests.checkpoint.saves import encode, save

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aioflux.store import Store


@pytest.fixture(params=["gs", "memory", "file"])
async def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    uris = {"memory": "memory://commits", "file": tmp_path.as_uri(), "gs": "gs://bucket/run"}
    if request.param == "gs":
        request.getfixturevalue("server")
    async with aioflux.open_store(uris[request.param]) as store:
        yield store
        await store.delete_many(await store.list_all())


async def keys(store: Store) -> list[str]:
    return [meta.key for meta in await store.list_all("a/")]


async def test_the_first_of_two_commits_stays(bucket: Store) -> None:
    first = await save(bucket, "a/", number=1)
    with pytest.raises(CheckpointError, match="meanwhile"):
        await commit(bucket, first.meta.key, b"second", first.commit, replaces=[])
    assert await bucket.get(first.meta.key) == encode(first.commit)


async def test_a_commit_replaces_only_what_was_read(bucket: Store) -> None:
    await save(bucket, "a/", number=1)
    seen = await read_commits(bucket, "a/")
    second = await save(bucket, "a/", number=2)
    with pytest.raises(CheckpointError, match="meanwhile"):
        await commit(bucket, second.meta.key, b"third", second.commit, replaces=seen)
    assert await bucket.get(second.meta.key) == encode(second.commit)


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
async def test_what_it_replaced_is_deleted(
    bucket: Store, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    await save(bucket, "a/", number=1, layout=layout)
    seen = await read_commits(bucket, "a/")
    new = await save(bucket, "b/", number=2)
    with caplog.at_level(logging.INFO, "aioflux"):
        assert await commit(bucket, "a/.metadata", encode(new.commit), new.commit, replaces=seen)
    assert await keys(bucket) == ["a/.metadata"]
    (line,) = [each.getMessage() for each in caplog.records if "committed" in each.getMessage()]
    assert new.commit.save_id in line
    assert f"{new.commit.num_bytes} bytes" in line


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
async def test_an_object_that_was_written_again_is_not_deleted(bucket: Store) -> None:
    """Deletes are pinned to the generations of the commit that was replaced."""
    old = await save(bucket, "a/", number=1)
    seen = await read_commits(bucket, "a/")
    again = next(iter(old.contents))
    await bucket.put(again, b"of a backup")
    new = await save(bucket, "b/", number=2)
    assert await commit(bucket, "a/.metadata", encode(new.commit), new.commit, replaces=seen)
    assert await keys(bucket) == ["a/.metadata", again]
