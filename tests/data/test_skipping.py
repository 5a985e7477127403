"""Many objects that are gone: each is skipped by itself, and costs no other one a request."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.data import IterableDataset, MapDataset
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.data.conftest import Bucket

NUM_OBJECTS = 120
WAYS = ["plain", "unordered", "composed", "cached"]


def options_of(way: str, directory: Path) -> dict[str, Any]:
    return {
        "plain": {},
        "unordered": {"ordered": False},
        "composed": {"compose": "on"},
        "cached": {"cache": directory / "cache"},
    }[way]


@pytest.mark.parametrize("way", WAYS)
def test_half_of_all_objects_are_gone(bucket: Bucket, tmp_path: Path, way: str) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    dataset = IterableDataset(bucket.uri, on_error="skip", **options_of(way, tmp_path))
    with aioflux.sync.open_store(bucket.uri) as store:
        store.delete_many(keys[::2])
    bucket.server.stats.reset()
    read = [sample.key for sample in dataset]
    assert (sorted(read) if way == "unordered" else read) == keys[1::2]
    assert dataset.stats.num_skipped == NUM_OBJECTS // 2
    # Composed, each may be a source, and then be asked for by itself, in one trial or the other.
    most = 1 if way in {"plain", "unordered", "cached"} else 1.2
    assert bucket.server.stats.operation("objects.get").requests <= most * NUM_OBJECTS
    if way == "cached":
        assert [sample.key for sample in dataset] == keys[1::2]
        assert dataset.stats.num_cache_hits == NUM_OBJECTS // 2


@pytest.mark.parametrize("way", ["plain", "composed", "cached"])
def test_a_batch_without_some_of_its_objects(bucket: Bucket, tmp_path: Path, way: str) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, on_error="skip", **options_of(way, tmp_path))
    with aioflux.sync.open_store(bucket.uri) as store:
        store.delete_many(keys[::3])
    left = [sample.key for sample in dataset.__getitems__(range(NUM_OBJECTS))]
    assert left == [key for number, key in enumerate(keys) if number % 3]
    assert dataset.stats.num_skipped == NUM_OBJECTS // 3


def test_batches_of_two_threads_raise_their_own_errors(tmp_path: Path) -> None:
    """A batch without any object raises the error of one of its objects, not of another batch."""
    keys = [f"{thread}-{number}" for thread in range(2) for number in range(4)]
    dataset = MapDataset.from_keys(
        f"file://{tmp_path}", keys, on_error=lambda _error, _uri: time.sleep(0)
    )

    def wrong_errors(thread: int) -> list[str]:
        own = keys[4 * thread : 4 * thread + 4]
        wrong = []
        for _ in range(10):
            try:
                dataset.__getitems__(range(4 * thread, 4 * thread + 4))
                wrong.append("no error")
            except NotFoundError as error:
                if error.uri.rpartition("/")[2] not in own:
                    wrong.append(error.uri)
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as executor:
            assert not any(executor.map(wrong_errors, range(2)))
    finally:
        sys.setswitchinterval(interval)


def test_names_with_characters_that_are_quoted_in_uris(tmp_path: Path) -> None:
    """As they arrive, errors are matched by their uri."""
    keys = ["a b", "ä%", "plain", "c#d", "a b"]
    (tmp_path / "plain").write_bytes(b"1")
    (tmp_path / "c#d").write_bytes(b"2")
    dataset = IterableDataset.from_keys(f"file://{tmp_path}", keys, ordered=False, on_error="skip")
    assert sorted(sample.key for sample in dataset) == ["c#d", "plain"]
    assert dataset.stats.num_skipped == 3


@pytest.mark.parametrize("ordered", [True, False])
def test_names_in_a_bucket_itself(bucket: Bucket, *, ordered: bool) -> None:
    bucket.server.put("bucket", "here", b"1")
    dataset = IterableDataset.from_keys(
        "gs://bucket", ["gone", "here", "gone"], ordered=ordered, on_error="skip"
    )
    assert [sample.key for sample in dataset] == ["here"]
    assert dataset.stats.num_skipped == 2


def test_by_default_the_first_of_them_ends_the_epoch(bucket: Bucket) -> None:
    keys = bucket.fill(30)
    dataset = IterableDataset(bucket.uri)
    with aioflux.sync.open_store(bucket.uri) as store:
        store.delete_many([keys[7], keys[20]])
    read = []
    with pytest.raises(aioflux.NotFoundError, match="train/007"):
        read.extend(sample.key for sample in dataset)
    stream = iter(dataset)
    assert [next(stream).key for _ in range(7)] == keys[:7]
    with pytest.raises(aioflux.NotFoundError, match="train/007"):
        next(stream)


@pytest.mark.parametrize("composed", [False, True])
def test_errors_in_place_of_objects(bucket: Bucket, *, composed: bool) -> None:
    """Of the store itself: in order, the error where its object would have been."""
    keys = bucket.fill(100)
    with aioflux.sync.open_store(bucket.uri) as store:
        metas = store.list_all()
        store.delete_many(keys[50:60])
        fetch = store.try_fetch_composed if composed else store.try_fetch_batches
        pairs = [pair for batch in fetch(metas) for pair in batch]
    assert len(pairs) == 100
    for number, (meta, data) in enumerate(pairs):
        if 50 <= number < 60:
            assert meta is None
            assert isinstance(data, aioflux.NotFoundError)
            assert data.uri == f"gs://bucket/train/{keys[number]}"
        else:
            assert (meta.key, data) == (keys[number], f"data of {keys[number]}".encode())
