"""Copies of checkpoints: the commit last, everything verified, nothing twice."""

from __future__ import annotations

import asyncio
import os

import pytest

from aioflux import checkpoint, open_store
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._format.commit import step_prefix
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)
from aioflux.options import RetryPolicy
from aioflux.testing.gcs_server import Hook
from tests.checkpoint.saves import METADATA, save, save_id, save_step

pytestmark = pytest.mark.clouds("gs", "s3", "az")

SIZE = 9_000_000
"""Two pieces of 8 MiB, the last one shorter."""


@pytest.fixture
async def bucket(server):
    async with open_store(server.root) as store:
        yield store


@pytest.fixture
async def disk(tmp_path):
    async with open_store(tmp_path.as_uri()) as store:
        yield store


def contents_of(saved, prefix):
    return {prefix + key.removeprefix(saved.prefix): data for key, data in saved.contents.items()}


def at(store, prefix=""):
    """Return the uri of a checkpoint in a store."""
    return f"{store.uri.rstrip('/')}/{prefix}"


def copy(source, target, **options):
    [copied] = checkpoint.copy(source, target, **options)
    return copied


async def assert_copied(saved, store, prefix="") -> None:
    found = checkpoint.verify(at(store, prefix), deep=True)
    assert found.problems == ()
    commit = found.found.commit
    assert commit.save_id == saved.commit.save_id
    assert commit.uri == at(store, prefix).rstrip("/")
    assert commit.metrics == saved.commit.metrics
    data = {key: await store.get(key) for key in contents_of(saved, prefix)}
    assert data == contents_of(saved, prefix)
    listed = {meta.key: meta.generation for meta in await store.list_all(prefix)}
    assert len(listed) == len(saved.keys) + 1
    for each in commit.objects:
        assert listed[prefix + each.key] == each.generation


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
async def test_a_copy_within_a_store_is_made_by_the_service(bucket, server, layout) -> None:
    saved = await save(bucket, "a/", number=3, layout=layout, metrics={"loss": 0.5}, size=SIZE)
    server.stats.reset()
    done = copy(at(bucket, "a"), at(bucket, "deep/er/b/"))
    assert server.stats.total.bytes_out < SIZE
    assert (done.is_new, done.num_objects, done.num_bytes) == (True, 2, 2 * SIZE)
    await assert_copied(saved, bucket, "deep/er/b/")


@pytest.mark.clouds("gs")
async def test_copies_between_schemes_go_there_and_back(bucket, disk) -> None:
    size = 36_000_000  # more pieces than are read at once
    saved = await save_step(bucket, 100, size=size, num_objects=1, metrics={"loss": 0.5})
    there = "copies/step-00000100/"
    done = copy(at(bucket, saved.prefix), at(disk, there))
    assert (done.uri, done.step) == (at(disk, there), 100)
    await assert_copied(saved, disk, there)
    copy(at(disk, there), at(bucket, "back/"))
    await assert_copied(saved, bucket, "back/")


async def test_stock_readers_find_the_names_of_the_metadata_in_a_copy(bucket, disk) -> None:
    """The pickle, with the names in it, is the same bytes."""
    saved = await save(bucket, "a/")
    copy(at(bucket, "a/"), at(disk))
    assert checkpoint.verify(at(disk)).found.data.startswith(METADATA)
    assert {meta.key for meta in await disk.list_all()} == {
        ".metadata",
        *(each.key for each in saved.commit.objects),
    }


async def test_the_same_checkpoint_is_copied_once(bucket, disk) -> None:
    await save(bucket, "a/")
    assert copy(at(bucket, "a/"), at(disk)).is_new
    before = {meta.key: meta.generation for meta in await disk.list_all()}
    assert not copy(at(bucket, "a/"), at(disk)).is_new
    assert {meta.key: meta.generation for meta in await disk.list_all()} == before


async def test_a_broken_copy_of_the_same_checkpoint_is_mended(bucket) -> None:
    saved = await save(bucket, "a/")
    target = at(bucket, "b/")
    copy(at(bucket, "a/"), target)
    first, second = contents_of(saved, "b/")
    await bucket.delete(first)
    await bucket.put(second, b"another")
    copy(at(bucket, "a/"), target)
    await assert_copied(saved, bucket, "b/")


async def test_what_a_copy_left_that_was_interrupted_is_not_written_again(bucket) -> None:
    """Unless it is another object, which may show in its bytes alone."""
    saved = await save(bucket, "a/")
    (first, data), (second, other) = contents_of(saved, "b/").items()
    written = await bucket.put(first, data)
    await bucket.put(second, bytes([other[0] ^ 1]) + other[1:])
    copy(at(bucket, "a/"), at(bucket, "b/"))
    await assert_copied(saved, bucket, "b/")
    assert (await bucket.head(first)).generation == written.generation


async def test_another_checkpoint_stays_unless_it_is_to_be_replaced(bucket) -> None:
    old = await save(bucket, "b/", number=9, layout="safetensors")
    saved = await save(bucket, "a/", number=3)
    under_way = f"b/{save_id(99)}/__0_0.distcp"
    await bucket.put(under_way, b"of a save at the same time")
    target = at(bucket, "b/")
    with pytest.raises(CheckpointError, match="is not replaced"):
        copy(at(bucket, "a/"), target)
    assert checkpoint.verify(at(bucket, "b/")).found.commit == old.commit
    copy(at(bucket, "a/"), target, overwrite=True)
    await bucket.delete(under_way)
    await assert_copied(saved, bucket, "b/")


async def test_what_does_not_verify_is_not_copied(bucket, disk, cloud) -> None:
    saved = await save(bucket, "a/")
    await bucket.put(saved.keys[0], saved.contents[saved.keys[1]])
    with pytest.raises(CheckpointCorruptError, match=r"crc32c|are not those"):
        copy(at(bucket, "a/"), at(disk))
    with pytest.raises(CheckpointNotFoundError):
        copy(at(bucket, "none/"), at(disk))
    if cloud == "gs":  # of others it shows on the way
        assert not await disk.list_all()
    assert not checkpoint.verify(at(disk, "")).is_committed


async def test_what_was_put_back_from_a_backup_is_mended_by_a_copy(bucket, disk, cloud) -> None:
    for store in (bucket, disk):
        saved = await save(store, "a/", size=SIZE)
        for key, data in saved.contents.items():
            await store.put(key, data)
        kinds = [problem.kind for problem in checkpoint.verify(at(store, "a/")).problems]
        has_same_names = store is bucket and cloud == "s3"  # there the bytes make the generation
        assert kinds == ([] if has_same_names else ["generation"] * 2)
        copy(at(store, "a/"), at(store, "b/"))
        await assert_copied(saved, store, "b/")
    other = await save(disk, "c/", number=4, size=SIZE)
    await disk.put(other.keys[0], other.contents[other.keys[1]])
    for store in (bucket, disk):
        with pytest.raises(CheckpointCorruptError, match="damaged"):
            copy(at(disk, "c/"), at(store, "d/"))
        assert not checkpoint.verify(at(store, "d/")).is_committed


async def test_bytes_that_rot_in_the_store_do_not_reach_the_copy(bucket, disk, tmp_path):
    saved = await save(disk, "a/", size=SIZE)
    path = tmp_path / saved.keys[0]
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE - 1)
        file.write(bytes([saved.contents[saved.keys[0]][-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointCorruptError, match="damaged"):
        copy(at(disk, "a/"), at(bucket, "b/"))
    assert not checkpoint.verify(at(bucket, "b/")).is_committed
    assert saved.keys[0].replace("a/", "b/") not in [meta.key async for meta in bucket.list("b/")]


@pytest.mark.parametrize(
    ("target", "says"),
    [("step-00000007/", "to itself"), ("x/step-00000008/", "names another step")],
)
async def test_copies_that_make_no_sense_are_refused(bucket, target, says) -> None:
    await save_step(bucket, 7)
    with pytest.raises(ValueError, match=says):
        copy(at(bucket, "step-00000007/"), at(bucket, target))


async def test_copies_of_the_same_at_the_same_time_do_not_tear_each_other(bucket) -> None:
    saved = await save(bucket, "a/", num_objects=6)
    uris = at(bucket, "a/"), at(bucket, "b/")
    done = await asyncio.gather(*(asyncio.to_thread(copy, *uris) for _ in range(4)))
    assert any(each.is_new for each in done)
    await assert_copied(saved, bucket, "b/")


class AfterListing(Hook):
    """Writes an object once the objects below its prefix were listed without it."""

    def __init__(self, server, prefix, key, data) -> None:
        self._server, self._prefix = server, prefix
        self._object = ("bucket", key, data)
        self.generation = 0
        server.app.hooks = (self, *server.app.hooks)

    def after(self, request, response):
        if request.query.get("prefix") == self._prefix and not self.generation:
            self.generation = self._server.put(*self._object)
        return response


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("kind", ["on the service", "through here"])
async def test_what_another_copy_created_meanwhile_is_taken_if_it_is_the_same(
    bucket, disk, server, kind
) -> None:
    """The listing of the target came before the other copy was there."""
    saved = await save(bucket, "a/")
    source = at(bucket, "a/")
    if kind == "through here":
        source = at(disk, "a/")
        copy(at(bucket, "a/"), source)
    first, data = next(iter(contents_of(saved, "b/").items()))
    foreign = AfterListing(server, "b/", first, b"of another program")
    with pytest.raises(CheckpointError, match="could not copy"):
        copy(source, at(bucket, "b/"))
    assert foreign.generation
    assert not checkpoint.verify(at(bucket, "b/")).is_committed
    await bucket.delete(first)
    theirs = AfterListing(server, "b/", first, data)
    copy(source, at(bucket, "b/"))
    await assert_copied(saved, bucket, "b/")
    assert (await bucket.head(first)).generation == str(theirs.generation)


@pytest.mark.clouds("gs")
async def test_another_save_that_commits_meanwhile_stays(bucket, server) -> None:
    await save(bucket, "a/", num_objects=1)
    other = await save(bucket, "other/", num_objects=1, number=5)
    data = await bucket.get(other.meta.key)
    commit = AfterListing(server, "b/", "b/.metadata", data)
    with pytest.raises(CheckpointError, match="another checkpoint is at"):
        copy(at(bucket, "a/"), at(bucket, "b/"))
    assert commit.generation
    assert await bucket.get("b/.metadata") == data


async def test_a_damaged_checkpoint_is_replaced_where_that_is_requested(bucket) -> None:
    saved = await save(bucket, "a/")
    await bucket.put("b/.metadata", (await bucket.get(saved.meta.key))[:-1])
    with pytest.raises(CheckpointError, match="is not replaced"):
        copy(at(bucket, "a/"), at(bucket, "b/"))
    copy(at(bucket, "a/"), at(bucket, "b/"), overwrite=True)
    await assert_copied(saved, bucket, "b/")


@pytest.mark.clouds("gs")
async def test_a_copy_killed_at_any_request_is_not_there_or_whole(server) -> None:
    """And what it leaves is found by `clean`, or used by the next copy."""
    async with open_store("memory://copies/source") as source:
        saved = await save(source, "a/", num_objects=3)
        for number in range(60):
            async with open_store(f"{server.root}/target-{number}") as store:
                old = await save(store, "b/", number=1, layout="dcp")
                uris, is_done = (at(source, "a/"), at(store, "b/")), True
                with server.faults.inject("*", status=503, skip=number):
                    try:
                        copy(*uris, overwrite=True, retry=RetryPolicy(max_attempts=1))
                    except AiofluxError:
                        is_done = False
                found = checkpoint.verify(uris[1], deep=True)
                assert found.is_valid, number
                assert found.found.commit.save_id in {old.commit.save_id, saved.commit.save_id}
                if number % 2:
                    checkpoint.clean(store.uri, older_than_seconds=0)
                    assert checkpoint.verify(uris[1], deep=True).is_valid
                copy(*uris, overwrite=True)
                checkpoint.clean(store.uri, older_than_seconds=0)
                await assert_copied(saved, store, "b/")
            if is_done:
                assert number > 5
                return
    pytest.fail("a copy never ended")


async def test_a_root_is_copied_step_by_step_and_a_broken_one_keeps_no_other(bucket, disk) -> None:
    async with open_store(at(bucket, "run")) as root:
        for step in (1, 2, 3):
            await save_step(root, step)
        broken = await save_step(root, 4)
        await root.delete(broken.keys[0])
        await root.put(f"{step_prefix(5)}{save_id(5)}/__0_0.distcp", b"under way")
    with pytest.raises(CheckpointCorruptError, match="run/step-00000004/"):
        checkpoint.copy(at(bucket, "run/"), at(disk))
    with Checkpointer(at(disk)) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3]
        assert checkpointer.latest(deep=True) == 3
    copied = checkpoint.copy(at(bucket, "run"), at(disk), steps=[2])
    assert [(each.step, each.is_new) for each in copied] == [(2, False)]
    with pytest.raises(CheckpointNotFoundError, match="run/step-00000009/"):
        checkpoint.copy(at(bucket, "run"), at(disk), steps=[2, 9])
