"""What dead processes leave behind is found by its age and its place, and removed."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux import ObjectMeta, OpenUpload
from aioflux._services.base import WriteRequest
from aioflux._transfer.temp_keys import stale_objects, stale_uploads
from aioflux._values.dataset_keys import WrittenKey
from tests.servers.process_state import memory_bucket
from tests.transfer.scripted_service import ScriptedService, refused_for_good, service_of

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 2, 1, tzinfo=UTC)
DAY = 86_400.0


def meta(key: str, age: float | None) -> ObjectMeta:
    updated = None if age is None else NOW - timedelta(seconds=age)
    return ObjectMeta(key=key, uri=f"memory://b/{key}", size=1, updated=updated)


@given(ages=st.lists(st.integers(0, 10**9)), limit=st.integers(0, 10**9))
def test_uploads_are_stale_from_that_age_on(ages: list[int], limit: int) -> None:
    uploads = [
        OpenUpload(key="k", upload_id=str(age), initiated=NOW - timedelta(seconds=age))
        for age in ages
    ]
    stale = stale_uploads(uploads, now=NOW, older_than_seconds=limit)
    assert [upload.upload_id for upload in stale] == [str(age) for age in ages if age >= limit]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (".aioflux-uploads/0123", True),
        ("run/7/.aioflux-uploads/0123", True),
        ("aioflux-composed-objects/a/b", True),
        ("x/aioflux-composed-objects/a", True),
        (".aioflux-uploads", False),
        ("x.aioflux-uploads/a", False),
        ("my-aioflux-composed-objects/a", False),
        ("train/a", False),
        (f"x/{'data-' + 32 * 'a'}-00000-0123abcd-00000.parquet", True),
        (f"x/{'data-' + 32 * 'a'}-00000-0123abcd/any/key", True),
    ],
)
def test_only_temporary_places_are_looked_at(key: str, expected: bool) -> None:
    found = stale_objects([meta(key, 2 * DAY)], now=NOW, older_than_seconds=DAY)
    assert bool(found) == expected


@pytest.mark.parametrize("age", [DAY - 1, None], ids=["young", "of unknown age"])
def test_what_may_be_under_way_stays(age: float | None) -> None:
    found = [meta(".aioflux-uploads/a", age)]
    assert stale_objects(found, now=NOW, older_than_seconds=DAY) == {}


def data_key(write: int, task: int = 0, attempt: int = 0, end: str = "-00000.parquet") -> str:
    """Return the name of a data object of `write_objects`."""
    return f"data-{write:032x}-{task:05d}-{attempt:08x}{end}"


def test_a_write_in_progress_stays() -> None:
    """The age of the youngest object of a write decides, whatever its task."""
    old, young = f"a/{data_key(1)}", f"a/{data_key(2)}"
    found = [meta(old, DAY), meta(young, DAY), meta(f"a/{data_key(2, task=1)}", DAY - 1)]
    stale = stale_objects(found, now=NOW, older_than_seconds=DAY)
    assert {dataset: [each.key for each in metas] for dataset, metas in stale.items()} == {
        "a/": [old]
    }


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (data_key(1), ("", "")),
        (f"a\nb/c/{data_key(1)}", ("a\nb/c/", "")),
        (data_key(1, end="/x/y"), ("", "x/y")),
        (data_key(1, end=f"/{data_key(2)}"), ("", data_key(2))),
    ],
)
def test_the_dataset_and_the_name_of_a_data_object(key: str, expected: tuple[str, str]) -> None:
    written = WrittenKey.parse(key)
    assert (written.dataset, written.name) == expected
    assert (
        written.attempt == f"{written.write_id}-00000-00000000" == f"data-{1:032x}-00000-00000000"
    )


@pytest.mark.parametrize(
    "key",
    [
        data_key(1, end="/"),
        data_key(1, end=".parquet"),
        data_key(1, end="-00000"),
        f"x{data_key(1)}",
        data_key(1).replace("0", "G", 1),
        "data-00000.parquet",
        "aioflux-manifest",
        "part-00000-6f0d5be4-1c1f-4b7a-9a4f-3c6d1f1f9d5e-c000.snappy.parquet",
    ],
)
def test_other_names_are_of_no_write(key: str) -> None:
    assert WrittenKey.parse(key) == WrittenKey()


async def manifest_of(store: aioflux.Store, *keys: str) -> bytes:
    listing = aioflux.Listing([await store.head(key) for key in keys])
    return listing.to_bytes(is_relative=True)


async def test_objects_that_a_manifest_lists_stay() -> None:
    """Those of a killed write, of failed attempts and of replaced manifests are deleted."""
    name = uuid.uuid4().hex
    bucket = memory_bucket(name)
    foreign = ["a/data-1.parquet", "a/part-0.parquet", "a/x.txt", f"a/x{data_key(1)}"]
    failed, killed, replaced = data_key(1, attempt=1), data_key(2), data_key(3)
    for key in (data_key(1), data_key(1, task=1), failed, killed, replaced):
        bucket.store(f"a/{key}", b"1")
    for key in (*foreign, f"b/{data_key(4)}", f"damaged/{data_key(5)}", f"two/{data_key(6)}"):
        bucket.store(key, b"1")
    async with aioflux.open_store(f"memory://{name}/a") as below:
        await below.put("aioflux-manifest", await manifest_of(below, replaced))
        listed = data_key(1), data_key(1, task=1)
        await below.put("aioflux-manifest", await manifest_of(below, *listed))
    async with aioflux.open_store(f"memory://{name}") as store:
        manifest = await store.get("a/aioflux-manifest")
        await store.put("damaged/aioflux-manifest", manifest[:-1])
        await store.put("two/aioflux-manifest", manifest)
        await store.put("two/aioflux-manifest-2", await manifest_of(store, f"two/{data_key(6)}"))
        before = set((await store.list_all()).keys)
        assert {f"a/{killed}", *foreign} <= before
        found = await store.clean(older_than_seconds=0, dry_run=True)
        assert set((await store.list_all()).keys) == before
        cleaned = await store.clean(older_than_seconds=0)
        assert found.removed == cleaned.removed
        assert set(cleaned.removed) == {
            *(f"a/{key}" for key in (failed, killed, replaced)),
            f"b/{data_key(4)}",
        }
        assert set((await store.list_all()).keys) == before - set(cleaned.removed)
        assert list(cleaned.errors) == ["damaged/aioflux-manifest"]
        assert "kept 1 objects" in str(cleaned.errors["damaged/aioflux-manifest"])


async def test_objects_of_a_manifest_stay_in_a_directory_with_another_path(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    listed, other = data_key(1), data_key(2)
    async with aioflux.open_store(f"file://{tmp_path}/data") as written:
        await written.put(listed, b"1")
        await written.put(other, b"1")
    async with aioflux.open_store(f"file://{tmp_path}/link") as link:
        await link.put("aioflux-manifest", await manifest_of(link, listed))
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for name in ("data", "link", "copy"):
        async with aioflux.open_store(f"file://{tmp_path}/{name}") as store:
            found = await store.clean(older_than_seconds=0, dry_run=True)
            assert found.removed == (other,)


async def test_objects_of_a_replaced_manifest_stay_until_the_new_one_is_old(tmp_path: Path) -> None:
    two_days_ago = time.time() - 2 * DAY
    async with aioflux.open_store(f"file://{tmp_path}") as store:
        await store.put(data_key(1), b"1")
        os.utime(tmp_path / data_key(1), (two_days_ago, two_days_ago))
        await store.put("aioflux-manifest", aioflux.Listing().to_bytes())
        assert (await store.clean()).removed == ()
        os.utime(tmp_path / "aioflux-manifest", (two_days_ago, two_days_ago))
        assert (await store.clean()).removed == (data_key(1),)


async def test_a_commit_after_the_listing_keeps_its_objects() -> None:
    scripted = ScriptedService("clean-late-commit")
    await scripted.store.put(data_key(1), b"1")
    committed = await manifest_of(scripted.store, data_key(1))
    list_page, pages = scripted.service.list_page, []

    async def list_page_then_commit(request):
        page = await list_page(request)
        pages.append(page)
        if len(pages) == 1:
            scripted.bucket.store("aioflux-manifest", committed)
        return page

    scripted.service.list_page = list_page_then_commit
    assert (await scripted.store.clean(older_than_seconds=0)).removed == ()


@pytest.fixture
async def store():
    name = uuid.uuid4().hex
    bucket = memory_bucket(name)
    for key in (
        "a/.aioflux-uploads/1",
        "a/aioflux-composed-objects/2",
        "a/3",
        "b/.aioflux-uploads/4",
    ):
        bucket.store(key, b"1")
    async with aioflux.open_store(f"memory://{name}") as opened:
        service = service_of(opened.uri)
        await service.initiate_upload(WriteRequest("a/5"))
        await service.initiate_upload(WriteRequest("b/6"))
        yield opened


async def keys(store: aioflux.Store) -> list[str]:
    """Keys of all there is, also of what listings of the root leave out."""
    prefixes = ("", "a/.aioflux-uploads/", "b/.aioflux-uploads/")
    return sorted([meta.key for prefix in prefixes for meta in await store.list_all(prefix)])


async def test_it_removes_what_is_below_the_prefix_and_nothing_else(store) -> None:
    result = await store.clean("a/", older_than_seconds=0)
    assert [upload.key for upload in result.aborted] == ["a/5"]
    assert result.removed == ("a/.aioflux-uploads/1", "a/aioflux-composed-objects/2")
    assert not result.errors
    assert await keys(store) == ["a/3", "b/.aioflux-uploads/4"]
    [left] = (await store.clean(older_than_seconds=0, dry_run=True)).aborted
    assert left.key == "b/6"


async def test_temporary_objects_are_listed_on_demand(store) -> None:
    assert [meta.key async for meta in store.list()] == ["a/3"]
    pages = [page async for page in store.list_pages(with_temporary=True)]
    assert [key for page in pages for key in page.keys] == [
        "a/.aioflux-uploads/1",
        "a/3",
        "a/aioflux-composed-objects/2",
        "b/.aioflux-uploads/4",
    ]


async def test_a_dry_run_reports_the_same_and_removes_nothing(store) -> None:
    before = await keys(store)
    told = await store.clean(older_than_seconds=0, dry_run=True)
    assert await keys(store) == before
    assert await store.clean(older_than_seconds=0) == told
    assert (await store.clean(older_than_seconds=0)) == aioflux.CleanResult(aborted=(), removed=())


async def test_by_default_a_day_must_have_passed(store) -> None:
    assert await store.clean() == aioflux.CleanResult(aborted=(), removed=())
    with pytest.raises(ValueError, match="-1"):
        await store.clean(older_than_seconds=-1)


async def test_an_upload_that_cannot_be_aborted_is_named_and_keeps_no_other() -> None:
    scripted = ScriptedService("clean-refused")
    for key in ("a", "b"):
        await scripted.service.initiate_upload(WriteRequest(key))
    scripted.service.fail("abort_upload", refused_for_good())
    result = await scripted.store.clean(older_than_seconds=0.0)
    assert [upload.key for upload in result.aborted] == ["b"]
    assert list(result.errors) == ["a"]
