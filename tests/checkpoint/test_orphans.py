"""What killed saves leave is found, and nothing else is."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ObjectMeta, open_store
from aioflux.checkpoint._maintain.orphans import (
    SaveLeftovers,
    clean_saves,
    clean_store,
    save_of,
    stale_objects,
)
from aioflux.checkpoint._maintain.verify import latest, verify
from tests.checkpoint.saves import METADATA, encode, save, save_id, save_step

pytestmark = pytest.mark.clouds("gs", "s3", "az")

NOW = datetime(2026, 1, 31, tzinfo=UTC)
ID = save_id(7)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (f"{ID}/__0_0.distcp", ("", ID)),
        (f"run/step-00000001/{ID}/__3_12.distcp", ("run/step-00000001/", ID)),
        (f"c/{ID}/rank-00000.json", ("c/", ID)),
        (f"c/model-{ID}-00001-of-00002.safetensors", ("c/", ID)),
        (f"model-{ID}-00001-of-00002.safetensors", ("", ID)),
        ("c/model-00001-of-00002.safetensors", None),
        ("c/.metadata", None),
        ("c/__0_0.distcp", None),
        (f"c/{ID}", None),
        (f"c/{ID}/deeper/__0_0.distcp", None),
        (f"c/x{ID}/__0_0.distcp", None),
        (f"c/model-{ID}-1-of-2.bin", None),
        ("Z-", None),
    ],
)
def test_a_key_tells_the_save_that_made_it(key, found) -> None:
    assert save_of(key) == found


@given(
    ages=st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=5),
    named=st.sets(st.integers(0, 4)),
)
def test_only_what_is_old_and_named_by_none_is_stale(ages, named) -> None:
    metas = [
        ObjectMeta(
            key=f"{at}",
            uri="",
            size=0,
            updated=None if age is None else NOW - timedelta(seconds=age),
        )
        for at, age in enumerate(ages)
    ]
    names = {str(each) for each in named}
    found = stale_objects(SaveLeftovers("", ID, metas), names, now=NOW, older_than_seconds=10)
    is_old = all(age is not None and age >= 10 for age in ages)
    assert [meta.key for meta in found] == [
        meta.key for meta in metas if is_old and meta.key not in names
    ]


@pytest.fixture
async def store(root):
    async with open_store(root) as store:
        yield store


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
    result = await clean_store(store, older_than_seconds=0, dry_run=True)
    assert result.removed == tuple(sorted(orphans))
    assert (await clean_store(store, "single/", older_than_seconds=0)).removed == (orphans[4],)
    done = await clean_store(store, older_than_seconds=0)
    assert done.removed == tuple(sorted(orphans[:4]))
    assert done.errors == {}
    left = {meta.key for meta in await store.list_all()}
    assert left == {*kept.keys, kept.meta.key, *loose.keys, loose.meta.key, *foreign}
    assert await latest(store, deep=True) == 1
    assert (await verify(store, "single", deep=True)).is_valid


async def test_what_a_rank_saved_for_itself_alone_is_kept(
    store,
) -> None:
    for rank in (0, 11):
        saved = await save(store, "c/", number=rank)
        await store.put(f"c/__{rank}.metadata", await store.get(saved.meta.key))
        await store.delete(saved.meta.key)
    await store.put(f"c/{ID}/__0_0.distcp", b".")
    before = {meta.key for meta in await store.list_all()}
    result = await clean_store(store, older_than_seconds=0)
    assert (result.removed, result.errors) == ((f"c/{ID}/__0_0.distcp",), {})
    assert {meta.key for meta in await store.list_all()} == before - set(result.removed)


async def test_a_save_under_way_is_known_by_its_youngest_object(tmp_path) -> None:
    async with open_store(tmp_path.as_uri()) as store:
        for rank in (0, 1):
            await store.put(f"c/{ID}/__{rank}_0.distcp", b".")
        old = time.time() - 7200
        os.utime(tmp_path / "c" / ID / "__0_0.distcp", (old, old))
        assert (await clean_store(store, older_than_seconds=3600)).removed == ()
        os.utime(tmp_path / "c" / ID / "__1_0.distcp", (old, old))
        assert len((await clean_store(store, older_than_seconds=3600)).removed) == 2


async def test_by_default_nothing_of_today_goes(store) -> None:
    await store.put(f"c/{ID}/__0_0.distcp", b".")
    assert (await clean_store(store)).removed == ()


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
    result = await clean_store(store, older_than_seconds=0)
    assert list(result.errors) == [saved.meta.key]
    assert "kept" in str(result.errors[saved.meta.key])
    assert saved.meta.key in result.errors[saved.meta.key].uri
    assert set(saved.keys) <= {meta.key for meta in await store.list_all()}


async def test_beside_a_stock_checkpoint_orphans_are_found(store) -> None:
    await store.put("c/.metadata", METADATA)
    await store.put("c/__0_0.distcp", b"stock")
    await store.put(f"c/{ID}/__0_0.distcp", b".")
    result = await clean_store(store, older_than_seconds=0)
    assert result.removed == (f"c/{ID}/__0_0.distcp",)


async def test_what_was_committed_after_the_listing_stays(store) -> None:
    """The commit object is read last: a save that ends meanwhile keeps its objects."""
    saved = await save_step(store, 1)
    await store.delete(saved.meta)
    listed = []

    async def pages(prefix=""):
        async for page in type(store).list_pages(store, prefix):
            yield page
        listed.append(await store.put(saved.meta.key, encode(saved.commit)))

    store.list_pages = pages
    try:
        found = await clean_saves(store, now=datetime.now(UTC), older_than_seconds=0)
    finally:
        del store.list_pages
    assert listed
    assert found.removed == ()
    assert await latest(store, deep=True) == 1


async def test_a_negative_age_is_refused(store) -> None:
    with pytest.raises(ValueError, match="older_than_seconds"):
        await clean_store(store, older_than_seconds=-1)
