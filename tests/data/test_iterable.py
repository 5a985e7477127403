"""IterableDataset: a sorted stream, split by rank."""

from __future__ import annotations

import pickle
import sys
import time
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import aioflux
from aioflux.data import IterableDataset, Sample
from tests.data.transforms import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.data.conftest import Bucket

pytestmark = pytest.mark.clouds("gs", "s3", "az")


@contextmanager
def process_group(rank: int) -> Iterator[None]:
    """This process as one of three, without the others."""
    hook = sys.excepthook  # torch puts its own in front, for good
    dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.fixture
def rank_1_of_3() -> Iterator[None]:
    with process_group(1):
        yield


def test_a_stream_is_sorted_and_whole(bucket: Bucket) -> None:
    keys = bucket.fill(30)
    assert list(IterableDataset(bucket.uri, transform=key_of)) == keys


def test_every_epoch_is_the_same(bucket: Bucket) -> None:
    bucket.fill(5)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    assert list(dataset) == list(dataset)


def test_without_a_transform_samples_come(bucket: Bucket) -> None:
    bucket.fill(1)
    (sample,) = IterableDataset(bucket.uri)
    assert isinstance(sample, Sample)
    assert sample.data == b"data of 000"


@pytest.mark.parametrize(
    ("tail", "counts"), [("pad", [4, 4, 4]), ("drop", [3, 3, 3]), ("uneven", [4, 3, 3])]
)
def test_given_ranks_share_the_objects(bucket: Bucket, tail: Any, counts: list[int]) -> None:
    keys = bucket.fill(10)
    shares = [
        list(IterableDataset(bucket.uri, transform=key_of, rank=rank, world_size=3, tail=tail))
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == counts
    assert shares[2] == keys[2::3] + (["001"] if tail == "pad" else [])
    read = sorted(key for share in shares for key in share)
    assert read == sorted(keys[: 9 if tail == "drop" else 10] + (keys[:2] if tail == "pad" else []))


def test_the_rank_comes_from_the_process_group(bucket: Bucket, rank_1_of_3: None) -> None:
    keys = bucket.fill(10)
    assert list(IterableDataset(bucket.uri, transform=key_of, tail="drop")) == keys[1:9:3]


def test_a_process_group_may_come_after_the_dataset(
    bucket: Bucket, request: pytest.FixtureRequest
) -> None:
    keys = bucket.fill(10)
    dataset = IterableDataset(bucket.uri, transform=key_of, tail="drop")
    request.getfixturevalue("rank_1_of_3")
    assert list(dataset) == keys[1:9:3]


def test_a_pickle_carries_the_rank_of_its_process_group(bucket: Bucket) -> None:
    """A spawned worker has no process group."""
    keys = bucket.fill(10)
    dataset = IterableDataset(bucket.uri, transform=key_of, tail="drop")
    with process_group(2):
        pickled = pickle.dumps(dataset)
    assert list(pickle.loads(pickled)) == keys[2:9:3]


def test_the_rank_comes_from_the_environment(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = bucket.fill(10)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(IterableDataset(bucket.uri, transform=key_of, tail="drop")) == keys[3:8:4]


def test_a_given_rank_wins(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, rank_1_of_3: None
) -> None:
    keys = bucket.fill(10)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = IterableDataset(bucket.uri, transform=key_of, rank=0, world_size=2)
    assert list(dataset) == keys[::2]


def test_a_rank_without_objects_reads_none(bucket: Bucket) -> None:
    bucket.fill(2)
    assert list(IterableDataset(bucket.uri, rank=5, world_size=8, tail="uneven")) == []


@pytest.mark.clouds("gs")
def test_from_keys_streams_these(bucket: Bucket) -> None:
    bucket.fill(5)
    dataset = IterableDataset.from_keys(
        bucket.uri, ["004", "000", "002"], transform=key_of, rank=1, world_size=2
    )
    assert list(dataset) == ["000", "004"]
    assert bucket.server.stats.operation("objects.list").requests == 0


@pytest.mark.clouds("gs")
def test_closing_a_stream_early_ends_its_requests(bucket: Bucket) -> None:
    keys = bucket.fill(300)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    stream = iter(dataset)
    assert next(stream) == "000"
    stream.close()
    assert list(dataset) == keys


def test_an_object_that_was_replaced_ends_the_stream(bucket: Bucket) -> None:
    bucket.fill(5)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    bucket.put("002", b"other")
    read = []
    with pytest.raises(aioflux.NotFoundError) as caught:
        read.extend(dataset)
    assert caught.value.uri == f"{bucket.uri}/002"


def test_an_empty_listing_is_an_error(bucket: Bucket) -> None:
    with pytest.raises(aioflux.NotFoundError, match="check the spelling"):
        IterableDataset(bucket.uri)


@pytest.mark.clouds("gs")
def test_samples_that_wait_for_a_slow_transform_stay_within_the_budget(tmp_path: Path) -> None:
    """Plus the sample that is transformed; also of objects in another order than the listing's."""
    # More than the 31 MiB that a new store allocates, never touches, and frees.
    size, budget = 4 << 20, 40 << 20
    for number in range(32):
        with (tmp_path / f"{number:02}").open("wb") as file:
            file.truncate(size)
    dataset = IterableDataset(
        f"file://{tmp_path}",
        transform=slow_size,
        shuffle=True,
        transfer=aioflux.TransferOptions(max_in_flight=16, max_in_flight_bytes=budget),
    )
    tracemalloc.start()
    try:
        assert list(dataset) == [size] * 32
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= budget + 2 * size + (2 << 20)


def slow_size(sample: Sample) -> int:
    time.sleep(0.005)  # while others arrive
    return len(sample.data)
