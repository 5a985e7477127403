"""Copies of checkpoints: the commit last, everything verified, nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from aioflux import open_store
from aioflux.checkpoint._format.commit import step_prefix
from aioflux.checkpoint._maintain.copy import CheckpointLocation as Location
from aioflux.checkpoint._maintain.copy import copy_checkpoint, copy_root
from aioflux.checkpoint._maintain.orphans import clean_store
from aioflux.checkpoint._maintain.verify import latest, verify
from aioflux.checkpoint._store.commits import list_steps, read_commit
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    TransientError,
)
from aioflux.options import RetryPolicy, Timeouts, TransferOptions
from aioflux.testing.faults import Fault, FlakyStore
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


async def assert_copied(saved, target) -> None:
    found = await verify(target.store, target.prefix, deep=True)
    assert found.problems == ()
    commit = found.found.commit
    assert commit.save_id == saved.commit.save_id
    assert commit.uri == target.uri.rstrip("/")
    assert commit.metrics == saved.commit.metrics
    data = {key: await target.store.get(key) for key in contents_of(saved, target.prefix)}
    assert data == contents_of(saved, target.prefix)
    listed = {meta.key: meta.generation for meta in await target.store.list_all(target.prefix)}
    assert len(listed) == len(saved.keys) + 1
    for each in commit.objects:
        assert listed[target.prefix + each.key] == each.generation


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
async def test_a_copy_within_a_store_is_made_by_the_service(bucket, layout) -> None:
    saved = await save(bucket, "a/", number=3, layout=layout, metrics={"loss": 0.5}, size=SIZE)
    before = bucket.stats
    target = Location(bucket, "deep/er/b/")
    done = await copy_checkpoint(Location(bucket, "a"), target)
    after = bucket.stats
    assert after.bytes_received - before.bytes_received < SIZE
    assert (done.is_new, done.num_objects, done.num_bytes) == (True, 2, 2 * SIZE)
    await assert_copied(saved, target)


@pytest.mark.clouds("gs")
async def test_copies_between_schemes_go_there_and_back(bucket, disk) -> None:
    size = 36_000_000  # more pieces than are read ahead
    saved = await save_step(bucket, 100, size=size, num_objects=1, metrics={"loss": 0.5})
    seen: list[int] = []
    there = Location(disk, "copies/step-00000100/")
    done = await copy_checkpoint(Location(bucket, saved.prefix), there, progress=seen.append)
    assert (done.uri, done.step, sum(seen)) == (there.uri, 100, size)
    await assert_copied(saved, there)
    back = Location(bucket, "back/")
    await copy_checkpoint(there, back)
    await assert_copied(saved, back)


async def test_stock_readers_find_the_names_of_the_metadata_in_a_copy(bucket, disk) -> None:
    """The pickle, with the names in it, is the same bytes."""
    saved = await save(bucket, "a/")
    await copy_checkpoint(Location(bucket, "a/"), Location(disk))
    found = await read_commit(disk, "")
    assert found.data.startswith(METADATA)
    assert {meta.key for meta in await disk.list_all()} == {
        ".metadata",
        *(each.key for each in saved.commit.objects),
    }


async def test_the_same_checkpoint_is_copied_once(bucket, disk) -> None:
    await save(bucket, "a/")
    assert (await copy_checkpoint(Location(bucket, "a/"), Location(disk))).is_new
    before = {meta.key: meta.generation for meta in await disk.list_all()}
    assert not (await copy_checkpoint(Location(bucket, "a/"), Location(disk))).is_new
    assert {meta.key: meta.generation for meta in await disk.list_all()} == before


async def test_a_broken_copy_of_the_same_checkpoint_is_mended(bucket) -> None:
    saved = await save(bucket, "a/")
    target = Location(bucket, "b/")
    await copy_checkpoint(Location(bucket, "a/"), target)
    first, second = contents_of(saved, "b/")
    await bucket.delete(first)
    await bucket.put(second, b"another")
    await copy_checkpoint(Location(bucket, "a/"), target)
    await assert_copied(saved, target)


async def test_what_a_copy_left_that_was_interrupted_is_not_written_again(bucket) -> None:
    """Unless it is another object, which may show in its bytes alone."""
    saved = await save(bucket, "a/")
    (first, data), (second, other) = contents_of(saved, "b/").items()
    written = await bucket.put(first, data)
    await bucket.put(second, bytes([other[0] ^ 1]) + other[1:])
    await copy_checkpoint(Location(bucket, "a/"), Location(bucket, "b/"))
    await assert_copied(saved, Location(bucket, "b/"))
    assert (await bucket.head(first)).generation == written.generation


async def test_another_checkpoint_stays_unless_it_is_to_be_replaced(bucket) -> None:
    old = await save(bucket, "b/", number=9, layout="safetensors")
    saved = await save(bucket, "a/", number=3)
    under_way = f"b/{save_id(99)}/__0_0.distcp"
    await bucket.put(under_way, b"of a save at the same time")
    target = Location(bucket, "b/")
    with pytest.raises(CheckpointError, match="stays"):
        await copy_checkpoint(Location(bucket, "a/"), target)
    assert (await verify(bucket, "b/")).found.commit == old.commit
    await copy_checkpoint(Location(bucket, "a/"), target, overwrite=True)
    await bucket.delete(under_way)
    await assert_copied(saved, target)


async def test_what_does_not_verify_is_not_copied(bucket, disk, cloud) -> None:
    saved = await save(bucket, "a/")
    await bucket.put(saved.keys[0], saved.contents[saved.keys[1]])
    with pytest.raises(CheckpointCorruptError, match=r"crc32c|are not those"):
        await copy_checkpoint(Location(bucket, "a/"), Location(disk))
    with pytest.raises(CheckpointNotFoundError):
        await copy_checkpoint(Location(bucket, "none/"), Location(disk))
    if cloud == "gs":  # of others it shows on the way
        assert not await disk.list_all()
    assert not (await verify(disk, "")).is_committed


async def test_what_was_put_back_from_a_backup_is_mended_by_a_copy(bucket, disk, cloud) -> None:
    for store in (bucket, disk):
        saved = await save(store, "a/", size=SIZE)
        for key, data in saved.contents.items():
            await store.put(key, data)
        kinds = [problem.kind for problem in (await verify(store, "a/")).problems]
        has_same_names = store is bucket and cloud == "s3"  # there the bytes make the generation
        assert kinds == ([] if has_same_names else ["generation"] * 2)
        await copy_checkpoint(Location(store, "a/"), Location(store, "b/"))
        await assert_copied(saved, Location(store, "b/"))
    other = await save(disk, "c/", number=4, size=SIZE)
    await disk.put(other.keys[0], other.contents[other.keys[1]])
    for store in (bucket, disk):
        with pytest.raises(CheckpointCorruptError, match="damaged"):
            await copy_checkpoint(Location(disk, "c/"), Location(store, "d/"))
        assert not (await verify(store, "d/")).is_committed


async def test_bytes_that_rot_in_the_store_do_not_reach_the_copy(bucket, disk, tmp_path):
    import os

    saved = await save(disk, "a/", size=SIZE)
    path = tmp_path / saved.keys[0]
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE - 1)
        file.write(bytes([saved.contents[saved.keys[0]][-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointCorruptError, match="damaged"):
        await copy_checkpoint(Location(disk, "a/"), Location(bucket, "b/"))
    assert not (await verify(bucket, "b/")).is_committed
    assert saved.keys[0].replace("a/", "b/") not in [meta.key async for meta in bucket.list("b/")]


@pytest.mark.parametrize(
    ("target", "says"), [("step-00000007/", "to itself"), ("x/step-00000008/", "would be another")]
)
async def test_copies_that_make_no_sense_are_refused(bucket, target, says) -> None:
    await save_step(bucket, 7)
    with pytest.raises(ValueError, match=says):
        await copy_checkpoint(Location(bucket, "step-00000007/"), Location(bucket, target))


async def test_copies_of_the_same_at_the_same_time_do_not_tear_each_other(bucket, server) -> None:
    saved = await save(bucket, "a/", num_objects=6)
    async with open_store(f"{server.root}/b") as other:
        goals = [
            Location(bucket, "b/"),
            Location(other),
            Location(bucket, "b/"),
            Location(other),
        ]
        source = Location(bucket, "a/")
        done = await asyncio.gather(*(copy_checkpoint(source, goal) for goal in goals))
        assert any(each.is_new for each in done)
        await assert_copied(saved, goals[0])


@pytest.mark.parametrize("kind", ["on the service", "through here"])
async def test_what_another_copy_created_meanwhile_is_taken_if_it_is_the_same(
    bucket, disk, kind
) -> None:
    """The listing of the target came before the other copy was there."""
    saved = await save(bucket, "a/")
    if kind == "through here":
        await copy_checkpoint(Location(bucket, "a/"), Location(disk, "a/"))
    source = Location(bucket if kind == "on the service" else disk, "a/")
    first, _ = contents_of(saved, "b/")
    target = Location(bucket, "b/")

    async def list_nothing(prefix=""):
        if prefix == "b/":
            del bucket.list_all
            return []
        return await type(bucket).list_all(bucket, prefix)

    await bucket.put(first, b"of another program")
    bucket.list_all = list_nothing
    with pytest.raises(CheckpointError, match="could not copy"):
        await copy_checkpoint(source, target)
    assert not (await verify(bucket, "b/")).is_committed
    theirs = await bucket.put(first, contents_of(saved, "b/")[first])
    bucket.list_all = list_nothing
    await copy_checkpoint(source, target)
    await assert_copied(saved, target)
    assert (await bucket.head(first)).generation == theirs.generation


async def test_another_save_that_commits_meanwhile_stays(bucket, server) -> None:
    await save(bucket, "a/", num_objects=1)
    other = await save(bucket, "other/", num_objects=1, number=5)
    data = await bucket.get(other.meta.key)

    def commit(num_bytes) -> None:
        server.put("bucket", "b/.metadata", data)

    with pytest.raises(CheckpointError, match="another checkpoint is at"):
        await copy_checkpoint(Location(bucket, "a/"), Location(bucket, "b/"), progress=commit)
    assert await bucket.get("b/.metadata") == data


async def test_a_damaged_checkpoint_is_replaced_where_that_is_asked_for(bucket) -> None:
    saved = await save(bucket, "a/")
    await bucket.put("b/.metadata", (await bucket.get(saved.meta.key))[:-1])
    with pytest.raises(CheckpointError, match="stays"):
        await copy_checkpoint(Location(bucket, "a/"), Location(bucket, "b/"))
    await copy_checkpoint(Location(bucket, "a/"), Location(bucket, "b/"), overwrite=True)
    await assert_copied(saved, Location(bucket, "b/"))


async def test_a_copy_killed_at_any_request_is_not_there_or_whole(server) -> None:
    """And what it leaves is found by `clean`, or used by the next copy."""
    async with open_store("memory://copies/source") as source:
        saved = await save(source, "a/", num_objects=3)
        for at in range(60):
            budget = [10**9]

            def draw(operation, budget=budget):
                budget[0] -= 1
                return Fault(kind="refuse") if budget[0] < 0 else None

            async with FlakyStore(
                f"memory://copies/target-{at}",
                draw=draw,
                transfer=TransferOptions(),
                retry=RetryPolicy(max_attempts=1),
                timeouts=Timeouts(),
            ) as store:
                old = await save(store, "b/", number=1, layout="dcp")
                target = Location(store, "b/")
                budget[0] = at
                try:
                    await copy_checkpoint(Location(source, "a/"), target, overwrite=True)
                    is_done = True
                except TransientError:
                    is_done = False
                budget[0] = 10**9
                found = await verify(store, "b/", deep=True)
                assert found.is_valid, at
                assert found.found.commit.save_id in {old.commit.save_id, saved.commit.save_id}
                if at % 2:
                    await clean_store(store, older_than_seconds=0)
                    assert (await verify(store, "b/", deep=True)).is_valid
                await copy_checkpoint(Location(source, "a/"), target, overwrite=True)
                await clean_store(store, older_than_seconds=0)
                await assert_copied(saved, target)
            if is_done:
                assert at > 5
                return
    pytest.fail("a copy never ended")


async def test_a_root_is_copied_step_by_step_and_a_broken_one_keeps_no_other(
    bucket, disk, server
) -> None:
    async with open_store(f"{server.root}/run") as root:
        for step in (1, 2, 3):
            await save_step(root, step)
        broken = await save_step(root, 4)
        await root.delete(broken.keys[0])
        await root.put(f"{step_prefix(5)}{save_id(5)}/__0_0.distcp", b"under way")
    copied, errors = await copy_root(Location(bucket, "run/"), Location(disk))
    assert [(each.step, each.is_new) for each in copied] == [(1, True), (2, True), (3, True)]
    assert list(errors) == [f"{server.root}/run/step-00000004/"]
    assert await list_steps(disk) == [1, 2, 3]
    assert await latest(disk, deep=True) == 3
    copied, errors = await copy_root(Location(bucket, "run"), Location(disk), steps=[2, 9])
    assert [(each.step, each.is_new) for each in copied] == [(2, False)]
    assert isinstance(errors[f"{server.root}/run/step-00000009/"], CheckpointNotFoundError)
