"""A worker prefetches predictable batches, and nothing else changes."""

from __future__ import annotations

import pickle
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

import aioflux
from aioflux.data import MapDataset, ObjectSampler, Sample, loader
from aioflux.data._batch_prefetch import BatchPrefetcher, predict_indices
from aioflux.store import COMPOSITE_PREFIX
from aioflux.testing.gcs_server import Network
from tests.bridge.patience import PATIENT
from tests.data.transforms import key_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from tests.data.conftest import Bucket

NUM_OBJECTS = 60


@given(
    num_objects=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    num_workers=st.integers(1, 4),
    worker=st.integers(0, 3),
)
def test_batches_in_order_predict_the_rest(
    num_objects: int, batch_size: int, num_workers: int, worker: int
) -> None:
    starts = range(worker * batch_size, num_objects, num_workers * batch_size)
    batches = [list(range(at, min(at + batch_size, num_objects))) for at in starts]
    known = 2 if batch_size == 1 else 1
    for number, batch in enumerate(batches):
        found = predict_indices(batches[:number], batch, num_objects)
        if found is None:
            assert number < known or len(batch) != batch_size
        else:
            assert found.tolist() == list(chain.from_iterable(batches[number:]))


@pytest.mark.parametrize(
    "batches",
    [
        [[0, 1], [2, 4]],
        [[0, 1], [0, 1]],
        [[4, 5], [2, 3]],
        [[0, 1, 2], [3, 4]],
        [[0], [1]],
        [[0], [1], [3]],
        [[7]],
        [[], []],
    ],
)
def test_other_batches_predict_nothing(batches: list[list[int]]) -> None:
    assert predict_indices(batches[:-1], batches[-1], 100) is None


class FakeSource:
    """Records the streams that were opened, and how many are open."""

    def __init__(self) -> None:
        self.opened: list[list[int]] = []
        self.num_open = 0

    def open(self, indices: Sequence[int]) -> Generator[tuple[int, Any], None, None]:
        self.opened.append(list(indices))
        self.num_open += 1
        try:
            for number, index in enumerate(indices):
                yield number, str(index)
        finally:
            self.num_open -= 1


@given(st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=3), max_size=12))
def test_each_batch_has_the_requested_objects(batches: list[list[int]]) -> None:
    """In order or not, and mixed."""
    source, prefetcher = FakeSource(), BatchPrefetcher()
    runs = [[at, at + 1] for at in range(0, 12, 2)]
    for batch in [*runs, *batches, *runs, *batches]:
        read = [sample for _, sample in prefetcher.read(batch, 30, source.open)]
        assert read == [str(index) for index in batch]
    prefetcher.close()
    assert source.num_open == 0


def test_a_run_is_one_stream() -> None:
    source, prefetcher = FakeSource(), BatchPrefetcher()
    for at in range(0, 10, 2):
        list(prefetcher.read([at, at + 1] if at < 8 else [8], 9, source.open))
    assert source.opened == [[0, 1], [2, 3, 4, 5, 6, 7, 8]]


def test_a_batch_that_is_closed_ends_the_stream() -> None:
    source, prefetcher = FakeSource(), BatchPrefetcher()
    for batch in ([0, 1], [2, 3]):
        list(prefetcher.read(batch, 30, source.open))
    assert source.num_open == 1
    samples = prefetcher.read([4, 5], 30, source.open)
    next(samples)
    samples.close()
    assert source.num_open == 0
    assert [each for _, each in prefetcher.read([5, 6], 30, source.open)] == ["5", "6"]
    assert isinstance(pickle.loads(pickle.dumps(prefetcher)), BatchPrefetcher)
    prefetcher.close()


@pytest.fixture
def as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(torch_worker, "_worker_info", info)


def end(dataset: MapDataset[Any]) -> None:
    for prefetcher in dataset._prefetchers:
        prefetcher.close()


def comes_to(bucket: Bucket, num_requests: int) -> bool:
    """Wait for so many requests, and return whether they came."""
    deadline = time.monotonic() + 100
    while bucket.server.stats.operation("objects.get").requests < num_requests:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def batches_of(size: int, num_objects: int = NUM_OBJECTS) -> list[list[int]]:
    return [list(range(at, min(at + size, num_objects))) for at in range(0, num_objects, size)]


@pytest.mark.usefixtures("as_a_worker")
@pytest.mark.parametrize("size", [1, 7, 100])
def test_an_epoch_in_order_reads_each_object_once(bucket: Bucket, size: int) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    bucket.server.stats.reset()
    for _ in range(2):
        read = [key for batch in batches_of(size) for key in dataset.__getitems__(batch)]
        assert read == keys
    end(dataset)
    assert bucket.server.stats.operation("objects.get").requests == 2 * NUM_OBJECTS
    assert dataset.stats.num_objects == 2 * NUM_OBJECTS


@pytest.mark.usefixtures("as_a_worker")
@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_shuffled_epoch_is_prefetched_in_the_order_of_its_sampler(
    bucket: Bucket, size: int
) -> None:
    """Each epoch in its own order, each object once; a resumed one, which is another, as well."""
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    sampler = ObjectSampler(dataset, shuffle=True, seed=3)
    bucket.server.stats.reset()
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        read: list[str] = []
        for at in range(0, NUM_OBJECTS, size):
            read += dataset.__getitems__(indices[at : at + size])
        assert read == [keys[index] for index in indices]
        seen.append(read)
    assert seen[0] != seen[1]
    assert bucket.server.stats.operation("objects.get").requests == 2 * NUM_OBJECTS
    taken = iter(sampler)
    begun = [next(taken) for _ in range(11)]
    sampler.load_state_dict(sampler.state_dict())
    rest = list(sampler)
    assert sorted(begun + rest) == list(range(NUM_OBJECTS))
    read = []
    for at in range(0, len(rest), 7):
        read += dataset.__getitems__(rest[at : at + 7])
    assert read == [keys[index] for index in rest]
    end(dataset)


@pytest.mark.usefixtures("as_a_worker")
def test_a_shuffled_batch_is_prefetched(bucket: Bucket) -> None:
    bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    indices = list(ObjectSampler(dataset, shuffle=True))
    bucket.server.stats.reset()
    for at in (0, 5):
        dataset.__getitems__(indices[at : at + 5])
    assert comes_to(bucket, 11)
    end(dataset)


@pytest.mark.usefixtures("as_a_worker")
def test_a_sampler_that_is_not_used_changes_nothing(bucket: Bucket) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    ObjectSampler(dataset, shuffle=True, rank=1, world_size=4)
    bucket.server.stats.reset()
    indices = torch.randperm(NUM_OBJECTS, generator=torch.Generator().manual_seed(1)).tolist()
    for at in range(0, NUM_OBJECTS, 4):
        batch = indices[at : at + 4]
        assert dataset.__getitems__(batch) == [keys[index] for index in batch]
    assert bucket.server.stats.operation("objects.get").requests == NUM_OBJECTS


@pytest.mark.usefixtures("as_a_worker")
def test_the_next_batch_is_prefetched(bucket: Bucket) -> None:
    bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    bucket.server.stats.reset()
    for batch in batches_of(5)[:2]:
        dataset.__getitems__(batch)
    assert comes_to(bucket, 11)
    end(dataset)


@pytest.mark.usefixtures("as_a_worker")
def test_keys_are_not_prefetched(bucket: Bucket) -> None:
    """Nothing pins them: a prefetched object could be another by then."""
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset.from_keys(bucket.uri, keys)
    for batch in batches_of(5)[:4]:
        dataset.__getitems__(batch)
    assert bucket.server.stats.operation("objects.get").requests == 20
    bucket.put(keys[20], b"new")
    assert dataset.__getitems__(batches_of(5)[4])[0].data == b"new"


def test_nothing_is_prefetched_outside_workers(bucket: Bucket) -> None:
    bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    bucket.server.stats.reset()
    for batch in batches_of(5)[:4]:
        dataset.__getitems__(batch)
    assert bucket.server.stats.operation("objects.get").requests == 20


@pytest.mark.usefixtures("as_a_worker")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_deleted_object_fails_its_own_batch(bucket: Bucket, on_error: Any) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of, on_error=on_error)
    with aioflux.sync.open_store(bucket.uri) as store:
        store.delete_many(["021", "022"])
    read: list[str] = []
    for batch in batches_of(5):
        if on_error == "raise" and 21 in batch:
            with pytest.raises(aioflux.NotFoundError) as caught:
                dataset.__getitems__(batch)
            assert caught.value.uri == "gs://bucket/train/021"
        else:
            read += dataset.__getitems__(batch)
    lost = keys[20:25] if on_error == "raise" else keys[21:23]
    assert read == [key for key in keys if key not in lost]
    end(dataset)


@pytest.mark.usefixtures("as_a_worker")
def test_a_transform_may_read_other_objects(bucket: Bucket) -> None:
    keys = bucket.fill(NUM_OBJECTS)

    def with_the_next(sample: Sample) -> tuple[str, str]:
        return sample.key, plain[(int(sample.key) + 1) % NUM_OBJECTS]

    plain: MapDataset[Any] = MapDataset(bucket.uri, transform=key_of)
    dataset: MapDataset[Any] = MapDataset(bucket.uri, transform=with_the_next)
    dataset._prefetchers = plain._prefetchers  # as if both were one dataset
    read = [pair for batch in batches_of(5) for pair in dataset.__getitems__(batch)]
    assert read == list(zip(keys, [*keys[1:], keys[0]], strict=True))
    end(dataset)


def test_through_a_loader_that_shuffles(bucket: Bucket) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    dataset = MapDataset(bucket.uri, transform=key_of)
    batches = loader(dataset, batch_size=4, num_workers=2, shuffle=True, start_method="fork")
    orders = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        orders.append([key for batch in batches for key in batch])
        assert sorted(orders[-1]) == keys
    assert orders[0] != orders[1]
    assert bucket.server.stats.operation("objects.get").requests == 2 * NUM_OBJECTS


@pytest.mark.usefixtures("patient_loaders")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_that_are_ended_leave_no_composite(bucket: Bucket, start_method: str) -> None:
    bucket.fill(600)
    bucket.server.network = Network(latency_seconds=0.02)
    dataset = MapDataset(
        bucket.uri,
        transform=key_of,
        compose="on",
        transfer=aioflux.TransferOptions(max_in_flight=8),
        endpoint_url=bucket.server.url,
        timeouts=PATIENT,
    )
    batches = iter(loader(dataset, batch_size=10, num_workers=2, start_method=start_method))
    for _ in range(8):
        next(batches)
    composed = bucket.server.stats.operation("objects.compose").requests
    assert composed > 0
    del batches
    assert bucket.server.keys("bucket", f"train/{COMPOSITE_PREFIX}") == []


def test_through_workers(bucket: Bucket) -> None:
    keys = bucket.fill(NUM_OBJECTS)
    bucket.server.network = Network(latency_seconds=0.005)
    dataset = MapDataset(bucket.uri, transform=key_of)
    batches = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for _ in range(2):
        read = [key for batch in batches for key in batch]
        assert read == keys
    assert dataset.stats.num_objects == 2 * NUM_OBJECTS
    assert bucket.server.stats.operation("objects.get").requests == 2 * NUM_OBJECTS
