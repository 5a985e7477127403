"""Both datasets through DataLoader: in the process itself, forked, spawned and from a fork server.

The server runs on a thread of the parent, and the parent has used the dataset before the workers
start, so that a forked worker inherits a running loop, its lock and its sockets. A fork server has
the environment of its own first start, hence the explicit endpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import aioflux
from aioflux.data import IterableDataset, MapDataset, Sample
from tests.data.transforms import key_of, refuse, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.data.conftest import Bucket

pytestmark = [
    pytest.mark.clouds("gs", "s3", "az"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

STARTS = ["fork", "spawn", "forkserver"]


@contextmanager
def reading(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """Iterate, and end the workers also where that fails.

    Left to the garbage collector, torch waits 5 s for each worker of a loader that failed.
    """
    batches = iter(loader)
    try:
        yield batches
    finally:
        if loader.num_workers:
            batches._shutdown_workers()


@pytest.mark.clouds
@pytest.mark.parametrize(
    ("cloud", "start"),
    # A fork server has the environment of the first test that asks it.
    [*(("gs", start) for start in STARTS), ("s3", "spawn"), ("az", "fork")],
    indirect=["cloud"],
)
def test_map_workers_read_every_object_in_order(bucket: Bucket, start: str) -> None:
    keys = bucket.fill(40)
    dataset = MapDataset(bucket.uri, transform=text_of, endpoint_url=bucket.server.url)
    assert dataset[0] == ("000", "data of 000")
    # Each that is spawned imports torch anew: how two share what there is, others say.
    num_workers = 1 if start == "spawn" else 2
    loader = DataLoader(
        dataset, batch_size=7, num_workers=num_workers, multiprocessing_context=start
    )
    read = [pair for batch in loader for pair in zip(*batch, strict=True)]
    assert read == [(key, f"data of {key}") for key in keys]
    assert dataset[1] == ("001", "data of 001")


@pytest.mark.clouds("gs")
def test_iterable_workers_share_the_objects(bucket: Bucket) -> None:
    keys = bucket.fill(41)
    dataset = IterableDataset(bucket.uri, transform=key_of, endpoint_url=bucket.server.url)
    assert next(iter(dataset)) == "000"
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = list(loader)
    assert bucket.server.stats.operation("objects.list").requests == 1
    assert sorted(key for batch in batches for key in batch) == keys
    assert batches[0] == keys[:8:2]
    assert list(dataset) == keys


def test_ranks_and_workers_share_the_objects(bucket: Bucket) -> None:
    keys = bucket.fill(23)
    read = []
    for rank in range(2):
        dataset = IterableDataset(
            bucket.uri, transform=key_of, rank=rank, world_size=2, tail="uneven"
        )
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        read += list(loader)
    assert sorted(read) == keys


def test_samples_pass_through_a_loader_with_a_list_for_collate(bucket: Bucket) -> None:
    bucket.fill(4)
    loader = DataLoader(
        MapDataset(bucket.uri),
        batch_size=2,
        collate_fn=list,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert [sample.uri for batch in loader for sample in batch] == [
        f"{bucket.uri}/{number:03d}" for number in range(4)
    ]


@pytest.mark.clouds("s3", "az")
@pytest.mark.parametrize(
    ("kind", "change"), [(MapDataset, "deleted"), (IterableDataset, "replaced")]
)
def test_a_changed_object_fails_its_batch_by_type_and_name(
    bucket: Bucket, kind: type[MapDataset], change: str
) -> None:
    """On the embedded server `test_changed.py` has all changes, through all ways to read."""
    bucket.fill(8)
    dataset = kind(bucket.uri, transform=key_of)
    if change == "deleted":
        with aioflux.sync.open_store(bucket.uri) as store:
            store.delete("005")
    else:
        bucket.put("005", b"other")
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    with (
        reading(loader) as batches,
        pytest.raises(aioflux.NotFoundError, match=f"{bucket.uri}/005"),
    ):
        list(batches)


def test_a_failed_batch_does_not_end_the_loader(bucket: Bucket) -> None:
    """What comes after the error is whole: no sample is lost in silence."""
    keys = bucket.fill(8)
    dataset = MapDataset(bucket.uri, transform=key_of)
    bucket.put("002", b"other")
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    with reading(loader) as batches:
        assert next(batches) == keys[:2]
        with pytest.raises(aioflux.NotFoundError):
            next(batches)
        assert list(batches) == [keys[4:6], keys[6:]]


def test_a_failing_transform_names_its_sample_from_a_worker(bucket: Bucket) -> None:
    bucket.fill(2)
    dataset = MapDataset(bucket.uri, transform=refuse)
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork")
    with (
        reading(loader) as batches,
        pytest.raises(ArithmeticError, match=f"while transforming {bucket.uri}/00"),
    ):
        list(batches)


def read_in_child(uri: str, keys: list[str]) -> None:
    os._exit(list(IterableDataset(uri, transform=key_of)) != keys)


@pytest.mark.clouds("gs")
def test_a_forked_process_builds_a_dataset(bucket: Bucket) -> None:
    """Threads of OpenMP, which torch has used in the parent, do not exist in the child."""
    keys = bucket.fill(3)
    assert list(IterableDataset(bucket.uri, transform=key_of)) == keys
    torch.ones(1_000_000).add_(1)
    process = multiprocessing.get_context("fork").Process(
        target=read_in_child, args=(bucket.uri, keys)
    )
    process.start()
    process.join(100)
    process.kill()
    process.join()
    assert process.exitcode == 0


@pytest.mark.clouds("gs")
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's own
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", [MapDataset, IterableDataset])
def test_a_transform_that_does_not_pickle_is_named_with_the_remedy(
    bucket: Bucket, kind: Any, start: str
) -> None:
    bucket.fill(1)

    def local(sample: Sample) -> str:
        return sample.key

    for transform in (lambda sample: sample.key, local, partial(local)):
        dataset = kind(bucket.uri, transform=transform)
        batches = DataLoader(dataset, num_workers=1, multiprocessing_context=start)
        with pytest.raises(TypeError, match=r"transform=.*cannot be pickled.*top of a module"):
            iter(batches)


@pytest.mark.clouds("gs")
def test_a_pickler_that_copies_functions_by_value_is_accepted(bucket: Bucket) -> None:
    """Such as that of cloudpickle: the state of a dataset holds the function as it is."""
    bucket.fill(1)
    transform = lambda sample: sample.key  # noqa: E731
    for dataset in (
        MapDataset(bucket.uri, transform=transform),
        IterableDataset(bucket.uri, transform=transform),
    ):
        assert dataset.__reduce_ex__(5)


class Requests(Dataset[tuple[float, int]]):
    """Durations of six requests, and the limit of requests in flight after them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[float, int]:
        transfer = aioflux.TransferOptions(max_requests_per_second=20)
        with aioflux.sync.open_store("memory://requests", transfer=transfer) as store:
            begun = time.monotonic()
            for number in range(6):
                store.put(f"{number}", b"")
            return time.monotonic() - begun, store.stats.max_in_flight


def test_workers_share_the_request_rate_and_count_in_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two workers sends 10 requests per second, and one of 80 processes starts slowly."""
    monkeypatch.setenv("WORLD_SIZE", "40")
    for seconds, limit in DataLoader(Requests(), batch_size=None, num_workers=2):
        assert seconds >= 0.49
        assert limit == 5000 // 80
