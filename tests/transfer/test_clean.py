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
from aioflux._transfer.temp_keys import manifest_of, stale_objects, stale_uploads
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
        ("x/aioflux-written-objects/m/1/a", True),
    ],
)
def test_only_temporary_places_are_looked_at(key: str, expected: bool) -> None:
    found = stale_objects([meta(key, 2 * DAY)], now=NOW, older_than_seconds=DAY)
    assert bool(found) == expected


@pytest.mark.parametrize("age", [DAY - 1, None], ids=["young", "of unknown age"])
def test_what_may_be_under_way_stays(age: float | None) -> None:
    found = [meta(".aioflux-uploads/a", age)]
    assert stale_objects(found, now=NOW, older_than_seconds=DAY) == {}


def test_a_write_in_progress_stays() -> None:
    """The age of the youngest object of a write decides."""
    old, young = "a/aioflux-written-objects/m/1/x", "a/aioflux-written-objects/m/2/x"
    found = [meta(old, DAY), meta(young, DAY), meta(f"{young}y", DAY - 1)]
    stale = stale_objects(found, now=NOW, older_than_seconds=DAY)
    assert {manifest: [each.key for each in metas] for manifest, metas in stale.items()} == {
        "a/m": [old]
    }


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("aioflux-written-objects/m/1/x", ("m", "aioflux-written-objects/m/1/")),
        ("a\nb/aioflux-written-objects/m/1/x/y", ("a\nb/m", "a\nb/aioflux-written-objects/m/1/")),
        ("aioflux-written-objects/m/1/", None),
        ("aioflux-written-objects/m/1", None),
        ("xaioflux-written-objects/m/1/x", None),
        (".aioflux-uploads/1", None),
    ],
)
def test_the_manifest_of_an_object(key: str, expected: tuple[str, str] | None) -> None:
    assert manifest_of(key) == expected


async def test_objects_of_a_manifest_stay() -> None:
    name = uuid.uuid4().hex
    bucket = memory_bucket(name)
    for number in range(4):
        bucket.store(f"a/aioflux-written-objects/m/1/{number}", b"1")
    bucket.store("a/aioflux-written-objects/gone/1/x", b"1")
    bucket.store("a/aioflux-written-objects/damaged/1/x", b"1")
    async with aioflux.open_store(f"memory://{name}/a") as below:
        listing = await below.list_all("aioflux-written-objects/m/1/")
        await below.put("m", listing[:3].to_bytes())
        await below.put("damaged", listing[:3].to_bytes()[:-1])
    async with aioflux.open_store(f"memory://{name}") as store:
        assert [meta.key async for meta in store.list()] == ["a/damaged", "a/m"]
        found = await store.clean(older_than_seconds=0, dry_run=True)
        cleaned = await store.clean(older_than_seconds=0)
        assert found.removed == cleaned.removed
        assert cleaned.removed == (
            "a/aioflux-written-objects/gone/1/x",
            "a/aioflux-written-objects/m/1/3",
        )
        assert list(cleaned.errors) == ["a/damaged"]
        assert "kept 1 objects" in str(cleaned.errors["a/damaged"])


async def test_objects_of_a_manifest_stay_in_a_directory_with_another_path(tmp_path: Path) -> None:
    prefix = "aioflux-written-objects/m/1/"
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    async with aioflux.open_store(f"file://{tmp_path}/data/{prefix}") as written:
        await written.put("a", b"1")
        await written.put("b", b"1")
    async with aioflux.open_store(f"file://{tmp_path}/link") as link:
        listing = await link.list_all(prefix)
        await link.put("m", listing[:1].to_bytes())
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for name in ("data", "link", "copy"):
        async with aioflux.open_store(f"file://{tmp_path}/{name}") as store:
            found = await store.clean(older_than_seconds=0, dry_run=True)
            assert found.removed == (f"{prefix}b",)


async def test_objects_of_a_replaced_manifest_stay_until_the_new_one_is_old(tmp_path: Path) -> None:
    two_days_ago = time.time() - 2 * DAY
    async with aioflux.open_store(f"file://{tmp_path}") as store:
        async with aioflux.open_store(f"file://{tmp_path}/aioflux-written-objects/m") as written:
            await written.put("1/a", b"1")
        os.utime(tmp_path / "aioflux-written-objects/m/1/a", (two_days_ago, two_days_ago))
        await store.put("m", aioflux.Listing().to_bytes())
        assert (await store.clean()).removed == ()
        os.utime(tmp_path / "m", (two_days_ago, two_days_ago))
        assert (await store.clean()).removed == ("aioflux-written-objects/m/1/a",)


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
