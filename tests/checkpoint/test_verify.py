"""Verification: each kind of damage is reported, and `latest` skips it."""

from __future__ import annotations

import msgspec
import pytest

from aioflux import open_store
from aioflux.checkpoint._format.commit import COMMIT_KEY, StoredItem, step_prefix
from aioflux.checkpoint._maintain.verify import (
    latest,
    newest_first,
    plan_pieces,
    verify,
    verify_steps,
)
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from tests.checkpoint.saves import METADATA, encode, save, save_step
from tests.patience import PATIENT

pytestmark = pytest.mark.clouds("gs", "s3", "az")

STEP = step_prefix(100)


@pytest.fixture
async def store(server):
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        yield store


@pytest.fixture
async def saved(store):
    await save_step(store, 50)
    return await save_step(store, 100)


def forge(commit, **changes):
    """A commit with one object changed, whose own checksum is right."""
    first, *others = commit.objects
    objects = (msgspec.structs.replace(first, **changes), *others)
    return encode(msgspec.structs.replace(commit, objects=objects))


async def kinds(store, *, deep=False):
    found = await verify(store, STEP, deep=deep)
    assert found.is_valid == (not found.problems)
    return [problem.kind for problem in found.problems]


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
@pytest.mark.clouds("gs", "s3", "az", "memory", "file")
async def test_what_was_saved_verifies(root, deep, layout) -> None:
    async with open_store(f"{root}/run") as store:
        await save_step(store, 100, layout=layout, size=300_000)
        found = await verify(store, STEP.rstrip("/"), deep=deep)
        assert found.problems == ()
        assert (found.step, found.num_objects, found.num_bytes) == (100, 2, 600_000)
        assert found.uri == store.uri + STEP
        found.check()


async def test_a_checkpoint_can_be_the_root_of_its_store(store, saved) -> None:
    async with open_store(store.uri + STEP) as inner:
        found = await verify(inner, "", deep=True)
        assert (found.is_valid, found.step) == (True, 100)


@pytest.mark.clouds("gs")
async def test_shallow_costs_a_listing_and_the_commit_object(store, saved) -> None:
    before = store.stats.num_requests
    await verify(store, STEP)
    assert store.stats.num_requests - before <= 3


async def test_nothing_committed_is_reported(store, saved) -> None:
    await store.delete(saved.meta)
    found = await verify(store, STEP)
    assert [problem.kind for problem in found.problems] == ["no_commit"]
    assert not found.is_committed
    with pytest.raises(CheckpointNotFoundError, match="step-00000100"):
        found.check()


@pytest.mark.clouds("gs")
async def test_a_service_that_fails_says_nothing_about_the_checkpoint(saved, server) -> None:
    async with open_store("gs://no-such-bucket/run") as store:
        with pytest.raises(StorageError):
            await latest(store)


async def damage(name, store, saved):
    first, second = saved.keys
    data = saved.contents[first]
    flipped = data[:70_000] + bytes([data[70_000] ^ 1]) + data[70_001:]
    match name:
        case "flipped":
            await store.put(first, flipped)
        case "truncated":
            await store.put(first, data[:-1])
        case "missing":
            await store.delete(first)
        case "swapped":
            await store.put(first, saved.contents[second])
            await store.put(second, data)
        case "rewritten":
            await store.put(first, data)
        case "commit flipped":
            whole = bytearray(await store.get(saved.meta.key))
            whole[len(whole) // 2] ^= 1
            await store.put(saved.meta.key, whole)
        case "commit truncated":
            whole = await store.get(saved.meta.key)
            await store.put(saved.meta.key, whole[:-5])
        case "commit cut to its pickle":
            await store.put(saved.meta.key, METADATA)
        case "commit of another step":
            other = await store.get(step_prefix(50) + COMMIT_KEY)
            await store.put(saved.meta.key, other)


DAMAGES = {
    "flipped": ["crc32c"],
    "truncated": ["size"],
    "missing": ["missing"],
    "swapped": ["crc32c", "crc32c"],
    "rewritten": ["generation"],
    "commit flipped": ["commit"],
    "commit truncated": ["commit"],
    "commit cut to its pickle": ["foreign"],
    "commit of another step": ["commit"],
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_is_reported_and_skipped(store, saved, cloud, name) -> None:
    if (cloud, name) == ("s3", "rewritten"):
        pytest.skip("the same bytes have the same ETag")
    assert await latest(store) == 100
    await damage(name, store, saved)
    found = await verify(store, STEP)
    expected = DAMAGES[name]
    if cloud != "gs":  # listings of others tell no checksum
        expected = ["generation" if kind == "crc32c" else kind for kind in expected]
    assert [problem.kind for problem in found.problems] == expected
    for problem in found.problems:
        assert problem.uri in problem.message
        assert STEP in problem.uri
    with pytest.raises(CheckpointCorruptError, match="step-00000100"):
        found.check()
    assert await latest(store) == 50
    steps = [(each.step, each.is_valid) for each in await verify_steps(store)]
    assert steps == [(50, True), (100, False)]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"key": "../step-00000050/.metadata"}, "commit"),
        ({"key": "notes.txt"}, "commit"),
        ({"items": (StoredItem(offset=99_999, length=2),)}, "commit"),
        ({"items": (StoredItem(offset=-1, length=2),)}, "commit"),
        ({"generation": "17"}, "generation"),
        ({"crc32c": 1}, "crc32c"),
        ({"size": 99_999}, "size"),
    ],
)
async def test_a_forged_commit_is_reported(store, saved, cloud, changes, kind) -> None:
    await store.put(saved.meta.key, forge(saved.commit, **changes))
    is_deep = cloud != "gs" and kind == "crc32c"  # listings of others tell no checksum
    assert await kinds(store, deep=is_deep) == ["commit" if is_deep else kind]
    assert await latest(store, deep=is_deep) == 50


async def test_a_commit_that_names_an_object_twice_is_reported(store, saved) -> None:
    twice = saved.commit.objects[:1] * 2
    forged = encode(msgspec.structs.replace(saved.commit, objects=twice))
    await store.put(saved.meta.key, forged)
    assert await kinds(store) == ["commit"]


async def test_blocks_that_do_not_make_up_the_whole_are_found_by_a_deep_check(store, saved) -> None:
    crcs = bytearray(saved.commit.objects[0].block_crcs)
    crcs[0] ^= 1
    await store.put(saved.meta.key, forge(saved.commit, block_crcs=bytes(crcs)))
    assert await kinds(store) == []
    assert await kinds(store, deep=True) == ["commit"]


async def test_a_flipped_bit_that_no_metadata_tell_is_found_by_a_deep_look(tmp_path) -> None:
    """As bits rot on a disk: size, generation and times are as before."""
    import os

    async with open_store(tmp_path.as_uri()) as store:
        await save_step(store, 50)
        saved = await save_step(store, 100)
        path = tmp_path / saved.keys[1]
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(70_000)
            byte = file.read(1)[0]
            file.seek(70_000)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert await latest(store) == 100
        found = await verify(store, STEP, deep=True)
        assert [problem.kind for problem in found.problems] == ["bytes"]
        assert saved.keys[1] in found.problems[0].message
        assert "is damaged" in found.problems[0].message
        assert await latest(store, deep=True) == 50


async def test_a_copy_elsewhere_is_verified_by_size_and_crc32c(store, saved, cloud) -> None:
    """Whatever copied it: generations are those of another place."""
    for meta in await store.list_all(STEP):
        await store.copy(meta, f"copy/{meta.key}")
    async with open_store(f"{store.uri}copy") as copy:
        assert await latest(copy, deep=True) == 100
        await copy.put(saved.keys[0], saved.contents[saved.keys[1]])
        is_deep = cloud != "gs"  # listings of others tell no checksum
        found = await verify(copy, STEP, deep=is_deep)
        assert [problem.kind for problem in found.problems] == ["bytes" if is_deep else "crc32c"]


class Changing:
    """A store in which a step is saved, and others are removed, after steps were listed."""

    def __init__(self, store, saves) -> None:
        self._store = store
        self._saves = list(saves)

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    async def list_all(self, prefix: str = "", **options):
        found = await self._store.list_all(prefix, **options)
        if options and self._saves:  # the level of the steps
            step, *old = self._saves.pop(0)
            await save_step(self._store, step)
            for each in old:
                await self._store.delete(step_prefix(each) + COMMIT_KEY)
        return found


@pytest.mark.clouds("gs")
async def test_latest_finds_what_is_committed_while_it_looks(store, saved) -> None:
    """A run that keeps one step then removes the others, of which parts may still be there."""
    await store.put(f"{step_prefix(200)}under-way", b"")
    assert await latest(Changing(store, [(200, 50, 100)])) == 200


@pytest.mark.clouds("gs")
async def test_steps_that_are_all_removed_meanwhile_give_way_to_newer_ones(store, saved) -> None:
    """A run that keeps one step goes on beside the process that loads it."""
    assert await latest(Changing(store, [(200, 50, 100), (300, 200)])) == 300


@pytest.mark.clouds("gs")
async def test_newest_first_reads_only_as_far_as_its_caller(store, saved) -> None:
    for step in (1, 2, 3):
        await save_step(store, step)
    before = store.stats.num_requests
    found = newest_first(store)
    assert (await anext(found)).step == 100
    await found.aclose()
    assert store.stats.num_requests - before <= 4


async def test_deep_reads_are_bounded(store) -> None:
    """However large an object is, no read is of more than a few whole blocks."""
    saved = await save(store, "big/", num_objects=1, size=9_000_000)
    pieces = plan_pieces(saved.commit.objects[0])
    assert [start for start, _ in pieces] == [0, 8 * 1024 * 1024]
    assert pieces[-1][1] == 9_000_000
    seen: list[int] = []
    assert (await verify(store, "big", deep=True, progress=seen.append)).is_valid
    assert sum(seen) == 9_000_000
