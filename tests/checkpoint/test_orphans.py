"""What killed saves leave is found, and nothing else is."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioflux import RetryPolicy, checkpoint, open_store
from aioflux.checkpoint import Checkpointer
from tests.checkpoint.saves import METADATA, encode, save, save_id, save_step
from tests.patience import wait_until

pytestmark = pytest.mark.clouds("gs", "s3", "az")

ID = save_id(7)


def clean(store, prefix="", **options):
    uri = f"{store.uri.rstrip('/')}/{prefix}"
    return checkpoint.clean(uri, **{"older_than_seconds": 0, **options})


def latest(store):
    with Checkpointer(store.uri) as checkpointer:
        return checkpointer.latest(deep=True)


@pytest.fixture
async def store(root):
    async with open_store(root) as store:
        yield store


async def test_objects_of_saves_are_known_by_their_keys(store) -> None:
    orphans = [
        f"{ID}/__0_0.distcp",
        f"c/{ID}/rank-00000.json",
        f"c/model-{ID}-00001-of-00002.safetensors",
        f"model-{ID}-00001-of-00002.safetensors",
        f"run/step-00000001/{ID}/__3_12.distcp",
    ]
    others = [
        "Z-",
        "c/.metadata",
        "c/__0_0.distcp",
        f"c/model-{ID}-1-of-2.bin",
        "c/model-00001-of-00002.safetensors",
        f"c/x{ID}/__0_0.distcp",
        f"d/{ID}/deeper/__0_0.distcp",
        f"e/{ID}",
    ]
    for key in (*orphans, *others):
        await store.put(key, METADATA)
    assert sorted(clean(store).removed) == sorted(orphans)


async def test_all_that_killed_saves_left_is_found_and_nothing_else(store) -> None:
    kept = await save_step(store, 1, number=2)
    loose = await save(store, "single/", number=3, layout="safetensors")
    orphans = [
        f"step-00000001/{save_id(1)}/__0_0.distcp",  # what an overwrite replaced
        f"step-00000001/{save_id(5)}/__1_0.distcp",  # killed in an overwrite
        f"step-00000001/{save_id(2)}/rank-00000.json",  # killed behind the commit
        f"step-00000002/{save_id(6)}/__0_0.distcp",  # killed before the commit
        f"single/model-{save_id(8)}-00001-of-00001.safetensors",
    ]
    foreign = ["step-00000002/notes.txt", "a/__0_0.distcp", "single/model.safetensors"]
    for key in (*orphans, *foreign):
        await store.put(key, b".")
    assert clean(store, dry_run=True).removed == tuple(sorted(orphans))
    assert clean(store, "single/").removed == (orphans[4].removeprefix("single/"),)
    done = clean(store)
    assert done.removed == tuple(sorted(orphans[:4]))
    assert done.errors == {}
    left = {meta.key for meta in await store.list_all()}
    assert left == {*kept.keys, kept.meta.key, *loose.keys, loose.meta.key, *foreign}
    assert latest(store) == 1
    assert checkpoint.verify(f"{store.uri.rstrip('/')}/single", deep=True).is_valid


async def test_what_a_rank_saved_for_itself_alone_is_kept(
    store,
) -> None:
    for rank in (0, 11):
        saved = await save(store, "c/", number=rank)
        await store.put(f"c/__{rank}.metadata", await store.get(saved.meta.key))
        await store.delete(saved.meta.key)
    await store.put(f"c/{ID}/__0_0.distcp", b".")
    before = {meta.key for meta in await store.list_all()}
    result = clean(store)
    assert (result.removed, result.errors) == ((f"c/{ID}/__0_0.distcp",), {})
    assert {meta.key for meta in await store.list_all()} == before - set(result.removed)


async def test_a_save_under_way_is_known_by_its_youngest_object(tmp_path) -> None:
    async with open_store(tmp_path.as_uri()) as store:
        for rank in (0, 1):
            await store.put(f"c/{ID}/__{rank}_0.distcp", b".")
        old = time.time() - 7200
        os.utime(tmp_path / "c" / ID / "__0_0.distcp", (old, old))
        assert clean(store, older_than_seconds=3600).removed == ()
        os.utime(tmp_path / "c" / ID / "__1_0.distcp", (old, old))
        assert len(clean(store, older_than_seconds=3600).removed) == 2


async def test_by_default_nothing_of_today_goes(store) -> None:
    await store.put(f"c/{ID}/__0_0.distcp", b".")
    assert checkpoint.clean(store.uri).removed == ()


@pytest.mark.parametrize("kind", ["damaged", "cut", "cut to its pickle"])
async def test_what_a_damaged_commit_object_may_name_stays_and_is_reported(store, kind) -> None:
    saved = await save_step(store, 1)
    data = bytearray(await store.get(saved.meta.key))
    data[-30] ^= 1
    await store.put(
        saved.meta.key,
        {"damaged": data, "cut": METADATA[:-3], "cut to its pickle": ID.encode() + METADATA}[kind],
    )
    if kind == "cut to its pickle":
        await store.put(f"step-00000001/{ID}/__0_0.distcp", b".")
    result = clean(store)
    assert list(result.errors) == [saved.meta.key]
    assert "kept" in str(result.errors[saved.meta.key])
    assert saved.meta.key in result.errors[saved.meta.key].uri
    assert set(saved.keys) <= {meta.key for meta in await store.list_all()}


async def test_beside_a_stock_checkpoint_orphans_are_found(store) -> None:
    await store.put("c/.metadata", METADATA)
    await store.put("c/__0_0.distcp", b"stock")
    await store.put(f"c/{ID}/__0_0.distcp", b".")
    result = clean(store)
    assert result.removed == (f"c/{ID}/__0_0.distcp",)


@pytest.mark.clouds("gs")
async def test_what_was_committed_after_the_listing_stays(store, server) -> None:
    """The commit object is read last: a save that ends meanwhile keeps its objects."""
    saved = await save_step(store, 1)
    await store.delete(saved.meta)
    retry = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)
    with ThreadPoolExecutor(1) as thread:
        with server.faults.inject("objects.*", key="*.metadata", status=503):
            cleaning = thread.submit(clean, store, retry=retry)
            wait_until(lambda: server.faults.injected["status"])
            server.put("bucket", f"{saved.meta.key}", encode(saved.commit))
        assert cleaning.result().removed == ()
    assert latest(store) == 1


async def test_a_negative_age_is_refused(store) -> None:
    with pytest.raises(ValueError, match="older_than_seconds"):
        clean(store, older_than_seconds=-1)
