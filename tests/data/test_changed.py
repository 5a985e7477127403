"""An object that changed between listing and read is an error by its own name, in every path."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import aioflux
from aioflux.data import IterableDataset, MapDataset
from tests.data.test_workers import reading
from tests.data.transforms import key_of, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.data.conftest import Bucket

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

CHANGED = "gs://bucket/train/005"
CHANGES = (aioflux.NotFoundError, aioflux.PreconditionFailedError)


def delete(bucket: Bucket) -> None:
    with aioflux.sync.open_store(bucket.uri) as store:
        store.delete("005")


def replace(bucket: Bucket) -> None:
    bucket.put("005", b"data of ???")


def truncate(bucket: Bucket) -> None:
    bucket.put("005", b"data")


def build(way: str, bucket: Bucket, tmp_path: Path) -> Any:
    if way == "map":
        return MapDataset(bucket.uri, transform=key_of)
    if way == "map-composed":
        return MapDataset(bucket.uri, transform=key_of, compose="on")
    if way == "map-cached":
        return MapDataset(bucket.uri, transform=key_of, cache=tmp_path / "cache")
    if way == "iterable":
        return IterableDataset(bucket.uri, transform=key_of)
    if way == "iterable-as-they-arrive":
        return IterableDataset(bucket.uri, transform=key_of, ordered=False)
    if way == "iterable-composed":
        return IterableDataset(bucket.uri, transform=key_of, compose="on")
    if way == "iterable-cached":
        return IterableDataset(bucket.uri, transform=key_of, cache=tmp_path / "cache")
    return IterableDataset(bucket.uri, records=lines_of)


WAYS = [
    "map",
    "map-composed",
    "map-cached",
    "iterable",
    "iterable-as-they-arrive",
    "iterable-composed",
    "iterable-cached",
    "iterable-records",
]


@pytest.mark.parametrize(
    ("way", "change", "num_workers"),
    [
        *((way, change, 0) for way in WAYS for change in (delete, replace)),
        # Of objects that are composed, another size would shift the bytes of those behind it.
        *((way, truncate, 0) for way in WAYS if "composed" in way),
        ("map", replace, 2),
        ("iterable-records", delete, 2),
    ],
)
def test_a_changed_object_is_named(
    bucket: Bucket, tmp_path: Path, way: str, change: Callable[[Bucket], None], num_workers: int
) -> None:
    bucket.fill(8)
    dataset = build(way, bucket, tmp_path)
    change(bucket)
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    with reading(loader) as batches, pytest.raises(CHANGES) as caught:
        list(batches)
    # Of an error in a worker torch carries over the type and the text of its traceback.
    said = [each for each in str(caught.value).splitlines() if "Error: " in each or not num_workers]
    assert re.search(rf"\s{re.escape(CHANGED)}(?!\w)", said[-1]), said
    assert caught.value.uri == CHANGED


@pytest.mark.parametrize("way", ["map-cached", "iterable-cached"])
def test_a_cached_object_is_the_listed_generation(bucket: Bucket, tmp_path: Path, way: str) -> None:
    """Its generation is the listed one, whatever the bucket holds by now."""
    keys = bucket.fill(8)
    dataset = build(way, bucket, tmp_path)
    list(DataLoader(dataset, batch_size=2))
    delete(bucket)
    assert [key for batch in DataLoader(dataset, batch_size=2) for key in batch] == keys


@pytest.mark.parametrize("way", WAYS)
def test_a_truncated_body_is_retried(bucket: Bucket, tmp_path: Path, way: str) -> None:
    bucket.fill(8)
    dataset = build(way, bucket, tmp_path)
    bucket.server.faults.add("objects.media", times=1, truncate_at=3)
    assert sum(len(batch) for batch in DataLoader(dataset, batch_size=2)) == 8
    assert bucket.server.faults.injected["truncate"] == 1
