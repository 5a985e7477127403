"""Verification: each kind of damage is reported, and `latest` skips it."""

from __future__ import annotations

import msgspec
import pytest

import aioflux
from aioflux import checkpoint, open_store
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._format.commit import COMMIT_KEY, StoredItem, step_prefix
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from tests.checkpoint.replaced import ReplacedOnce
from tests.checkpoint.saves import METADATA, encode, save, save_step
from tests.patience import PATIENT

pytestmark = pytest.mark.clouds("gs", "s3", "az")

STEP = step_prefix(100)


def verify(store, prefix, *, deep=False):
    return checkpoint.verify(f"{store.uri}{prefix}", deep=deep)


def latest(store, *, deep=False):
    with Checkpointer(store.uri) as checkpointer:
        return checkpointer.latest(deep=deep)


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


def kinds(store, *, deep=False):
    found = verify(store, STEP, deep=deep)
    assert found.is_valid == (not found.problems)
    return [problem.kind for problem in found.problems]


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
@pytest.mark.clouds("gs", "s3", "az", "memory", "file")
async def test_what_was_saved_verifies(root, deep, layout) -> None:
    async with open_store(f"{root}/run") as store:
        await save_step(store, 100, layout=layout, size=300_000)
        found = verify(store, STEP.rstrip("/"), deep=deep)
        assert found.problems == ()
        assert (found.step, found.num_objects, found.num_bytes) == (100, 2, 600_000)
        assert found.uri == store.uri + STEP
        found.check()


async def test_a_checkpoint_can_be_the_root_of_its_store(store, saved) -> None:
    found = verify(store, STEP.rstrip("/"), deep=True)
    assert (found.is_valid, found.step) == (True, 100)


@pytest.mark.clouds("gs")
async def test_shallow_costs_a_listing_and_the_commit_object(store, saved, server) -> None:
    server.stats.reset()
    verify(store, STEP)
    assert server.stats.total.requests <= 3


async def test_nothing_committed_is_reported(store, saved) -> None:
    await store.delete(saved.meta)
    found = verify(store, STEP)
    assert [problem.kind for problem in found.problems] == ["no_commit"]
    assert not found.is_committed
    with pytest.raises(CheckpointNotFoundError, match="step-00000100"):
        found.check()


@pytest.mark.clouds("gs")
async def test_a_service_that_fails_says_nothing_about_the_checkpoint(saved, server) -> None:
    with Checkpointer("gs://no-such-bucket/run") as checkpointer, pytest.raises(StorageError):
        checkpointer.latest()


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
    assert latest(store) == 100
    await damage(name, store, saved)
    found = verify(store, STEP)
    expected = DAMAGES[name]
    if cloud != "gs":  # listings of others tell no checksum
        expected = ["generation" if kind == "crc32c" else kind for kind in expected]
    assert [problem.kind for problem in found.problems] == expected
    for problem in found.problems:
        assert problem.uri in problem.message
        assert STEP in problem.uri
    with pytest.raises(CheckpointCorruptError, match="step-00000100"):
        found.check()
    assert latest(store) == 50
    with Checkpointer(store.uri) as checkpointer:
        assert checkpointer.steps() == [50, 100]
        assert checkpointer.verify(50).is_valid


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
    assert kinds(store, deep=is_deep) == ["commit" if is_deep else kind]
    assert latest(store, deep=is_deep) == 50


async def test_a_commit_that_names_an_object_twice_is_reported(store, saved) -> None:
    twice = saved.commit.objects[:1] * 2
    forged = encode(msgspec.structs.replace(saved.commit, objects=twice))
    await store.put(saved.meta.key, forged)
    assert kinds(store) == ["commit"]


async def test_blocks_that_do_not_make_up_the_whole_are_found_by_a_deep_check(store, saved) -> None:
    crcs = bytearray(saved.commit.objects[0].block_crcs)
    crcs[0] ^= 1
    await store.put(saved.meta.key, forge(saved.commit, block_crcs=bytes(crcs)))
    assert kinds(store) == []
    assert kinds(store, deep=True) == ["commit"]


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
        assert latest(store) == 100
        found = verify(store, STEP, deep=True)
        assert [problem.kind for problem in found.problems] == ["bytes"]
        assert saved.keys[1] in found.problems[0].message
        assert "is damaged" in found.problems[0].message
        assert latest(store, deep=True) == 50


async def test_a_copy_elsewhere_is_verified_by_size_and_crc32c(store, saved, cloud) -> None:
    """Whatever copied it: generations are those of another place."""
    for meta in await store.list_all(STEP):
        await store.copy(meta, f"copy/{meta.key}")
    async with open_store(f"{store.uri}copy") as copy:
        assert latest(copy, deep=True) == 100
        await copy.put(saved.keys[0], saved.contents[saved.keys[1]])
        is_deep = cloud != "gs"  # listings of others tell no checksum
        found = verify(copy, STEP, deep=is_deep)
        assert [problem.kind for problem in found.problems] == ["bytes" if is_deep else "crc32c"]


class StepsThatChange(aioflux.testing.gcs_server.Hook):
    """Commits steps and removes others when the steps were listed.

    The steps come from another run: their generations are not compared.
    """

    def __init__(self, server, *changes) -> None:
        self._server = server
        self._changes = list(changes)
        self.num_done = 0
        server.app.hooks = (self, *server.app.hooks)

    def after(self, request, response):
        if self._changes and "delimiter" in request.query:
            step, *old = self._changes.pop(0)
            for key in self._server.keys("bucket"):
                if key.startswith(f"later/{step_prefix(step)}"):
                    data = self._server.get("bucket", key)
                    self._server.put("bucket", key.replace("later/", "run/"), data)
            for each in old:
                self._server.state.delete("bucket", f"run/{step_prefix(each)}{COMMIT_KEY}")
            self.num_done += 1
        return response


@pytest.fixture
async def later(server):
    async with open_store(f"{server.root}/later") as store:
        for step in (200, 300):
            await save_step(store, step)


@pytest.mark.clouds("gs")
@pytest.mark.usefixtures("later")
async def test_latest_finds_what_is_committed_while_it_looks(store, saved, server) -> None:
    """A run that keeps one step then removes the others, of which parts may still be there."""
    await store.put(f"{step_prefix(200)}under-way", b"")
    changes = StepsThatChange(server, (200, 50, 100))
    assert latest(store) == 200
    assert changes.num_done == 1


@pytest.mark.clouds("gs")
@pytest.mark.usefixtures("later")
async def test_steps_that_are_all_removed_meanwhile_give_way_to_newer_ones(
    store, saved, server
) -> None:
    """A run that keeps one step goes on beside the process that loads it."""
    changes = StepsThatChange(server, (200, 50, 100), (300, 200))
    assert latest(store) == 300
    assert changes.num_done == 2


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
async def test_a_step_that_is_replaced_meanwhile_is_verified_anew(store, server, deep) -> None:
    async with open_store(f"{server.root}/later") as later:
        new = await save_step(later, 100, number=2)
    await save_step(store, 100)
    replaced = ReplacedOnce(server, "run/", "later/", after=b".metadata" if deep else b"/o?")
    found = verify(store, STEP, deep=deep)
    assert replaced.is_done
    assert found.problems == ()
    assert found.found.commit == new.commit


@pytest.mark.clouds("gs")
async def test_a_step_that_is_removed_while_it_is_verified_is_not_committed(store, server) -> None:
    await save_step(store, 100)
    replaced = ReplacedOnce(server, "run/", "later/", after=b"/o?")
    assert not verify(store, STEP).is_committed
    assert replaced.is_done


@pytest.mark.clouds("gs")
async def test_older_steps_are_not_read_if_the_newest_verifies(store, saved, server) -> None:
    for step in (1, 2, 3):
        await save_step(store, step)
    server.stats.reset()
    assert latest(store) == 100
    assert server.stats.total.requests == 3  # two listings and the commit object


@pytest.mark.clouds("gs")
async def test_deep_reads_are_bounded(store, server) -> None:
    """However large an object is, no read is of more than a few whole blocks."""
    await save(store, "big/", num_objects=1, size=9_000_000)
    server.stats.reset()
    assert verify(store, "big", deep=True).is_valid
    assert server.stats.total.requests == 4  # a listing, the commit object, two pieces
