"""Listing and reading steps."""

from __future__ import annotations

import math

import pytest

from aioflux import open_store
from aioflux.checkpoint._format.commit import COMMIT_KEY, step_prefix
from aioflux.checkpoint._store.steps import (
    describe_steps,
    is_original,
    list_steps,
    read_commit,
    uri_below,
)
from aioflux.errors import CheckpointNotFoundError
from tests.checkpoint.saves import METADATA, save_step
from tests.patience import PATIENT

pytestmark = pytest.mark.clouds("gs", "s3", "az", "memory", "file")


@pytest.fixture
async def store(root):
    async with open_store(f"{root}/run") as store:
        yield store


async def test_steps_are_those_with_a_commit_object(store) -> None:
    for step in (100, 2, 30):
        await save_step(store, step)
    await save_step(store, 7, layout="safetensors")
    await store.put("step-00000050/20261122T031500.123Z-3f9a12cd/__0_0.distcp", b"under way")
    await store.put("other/.metadata", b"")
    await store.put("step-x/.metadata", b"")
    assert await list_steps(store) == [2, 7, 30, 100]


async def test_no_root_has_no_steps(store) -> None:
    assert await list_steps(store) == []
    assert await describe_steps(store) == []


async def test_a_step_reads_as_it_was_saved(store) -> None:
    saved = await save_step(store, 100, metrics={"loss": 0.5}, created=12.0)
    meta, data, commit, _ = await read_commit(store, step_prefix(100))
    assert commit == saved.commit
    assert meta.generation == saved.meta.generation
    assert data.startswith(METADATA)
    assert is_original(store, step_prefix(100), commit)
    assert not is_original(store, step_prefix(101), commit)


@pytest.mark.parametrize("root", ["memory://bucket", "memory://bucket/run", "file:///a%25b"])
async def test_uris_of_objects_are_those_that_the_store_reports(root, tmp_path) -> None:
    """Also below a bucket itself, and where a name on disk holds a percent sign."""
    uri = root.replace("file:///", f"file://{tmp_path}/")
    async with open_store(uri) as store:
        meta = await store.put("c%41/d", b"")
        assert uri_below(store, "c%41/d") == meta.uri == (await store.head("c%41/d")).uri


async def test_one_place_on_disk_has_several_names(tmp_path) -> None:
    async with open_store(f"file://{tmp_path}/run") as store:
        saved = await save_step(store, 1)
    (tmp_path / "link").symlink_to("run")
    for name in ("link", "./run", "run/../run"):
        async with open_store(f"file://{tmp_path}/{name}") as store:
            assert is_original(store, step_prefix(1), saved.commit)
            assert not is_original(store, step_prefix(2), saved.commit)


async def test_a_step_may_be_missing_or_of_another_program(store) -> None:
    await store.put("step-00000001/" + COMMIT_KEY, METADATA)
    with pytest.raises(CheckpointNotFoundError, match="step-00000002"):
        await read_commit(store, step_prefix(2))
    assert (await read_commit(store, step_prefix(1))).commit is None


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
async def test_a_metric_that_is_not_finite_does_not_spoil_the_step(store, layout) -> None:
    """JSON has no word for it."""
    metrics = {"loss": math.nan, "best": -math.inf, "accuracy": 1}
    await save_step(store, 1, metrics=metrics, layout=layout)
    commit = (await read_commit(store, step_prefix(1))).commit
    assert commit.metrics == {"accuracy": 1.0}


async def test_of_two_layouts_the_newer_counts(store) -> None:
    await save_step(store, 1, number=1)
    newer = await save_step(store, 1, number=2, layout="safetensors")
    assert (await read_commit(store, step_prefix(1))).commit == newer.commit


async def test_a_summary_lists_broken_steps_too(store) -> None:
    saved = await save_step(store, 1, metrics={"loss": 2.0}, created=5.0)
    broken = await save_step(store, 2)
    data = bytearray(await store.get(broken.meta.key))
    data[-30] ^= 1
    await store.put(broken.meta.key, data)
    first, second = await describe_steps(store)
    assert (first.step, first.num_bytes, first.num_objects) == (1, 200_000, 2)
    assert (first.metrics, first.created, first.problem) == ({"loss": 2.0}, 5.0, "")
    assert first.save_id == saved.commit.save_id
    assert second.step == 2
    assert "crc32c" in second.problem


@pytest.mark.clouds("gs")
async def test_hundreds_of_steps_take_a_request_each_and_one_listing(server) -> None:
    for step in range(300):
        server.put("bucket", f"run/{step_prefix(step)}{COMMIT_KEY}", b".")
        for rank in range(3):
            server.put("bucket", f"run/{step_prefix(step)}objects/{rank}", b"")
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        assert await list_steps(store) == list(range(300))
        assert store.stats.num_requests == 301
