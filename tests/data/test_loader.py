"""loader(), ObjectSampler and torchdata's StatefulDataLoader."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

from aioflux.data import IterableDataset, MapDataset, ObjectSampler, Sample, loader, merge_states
from aioflux.testing.gcs_server import Network
from tests.data.test_workers import reading
from tests.data.transforms import dice_of, key_of, lines_of

if TYPE_CHECKING:
    from tests.data.conftest import Bucket

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torchdata 0.11 takes a name from torch that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

KINDS = [MapDataset, IterableDataset]


def build(kind: type[Any], bucket: Bucket, num_workers: int, **options: Any) -> DataLoader[Any]:
    """A resumable loader of shuffled keys, of either kind of dataset."""
    start = "fork" if num_workers else None
    common = {"num_workers": num_workers, "start_method": start, "resumable": True, "batch_size": 4}
    if kind is MapDataset:
        dataset = MapDataset(bucket.uri, transform=key_of)
        return loader(dataset, shuffle=True, seed=3, **common, **options)
    return loader(
        IterableDataset(bucket.uri, transform=key_of, shuffle=True, seed=3), **common, **options
    )


@pytest.mark.clouds("gs", "s3", "az")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stateful_loader_resumes_at_any_batch(
    bucket: Bucket, kind: type[Any], num_workers: int
) -> None:
    pytest.importorskip("torchdata")
    keys = bucket.fill(42)
    batches = build(kind, bucket, num_workers)
    with reading(batches) as stream:
        read = list(islice(stream, 5))
        state = batches.state_dict()
        rest = list(stream)
    other = build(kind, bucket, num_workers)
    other.load_state_dict(state)
    with reading(other) as stream:
        assert list(stream) == rest
        assert sorted(key for batch in read + rest for key in batch) == keys
        assert sorted(key for batch in other for key in batch) == keys, "the next epoch is whole"


WAYS: dict[str, dict[str, Any]] = {
    "threads": {"num_threads": 2},
    "inline": {"num_threads": 0},
    "stateful": {"num_workers": 0, "resumable": True},
    "stateful-workers": {"num_workers": 2, "resumable": True, "start_method": "fork"},
}
"""Loaders that resume from the states of each other."""


@pytest.mark.parametrize("is_exhausted", [True, False], ids=["after-the-loop", "in-the-loop"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_after_the_last_batch_nothing_is_left_of_the_epoch(
    bucket: Bucket, kind: type[Any], way: str, is_exhausted: bool
) -> None:
    pytest.importorskip("torchdata")
    keys = bucket.fill(7)

    def new(epoch: int) -> DataLoader[Any]:
        dataset = kind(bucket.uri, transform=key_of)
        batches = loader(dataset, batch_size=2, **WAYS[way])
        (batches.sampler if kind is MapDataset else dataset).set_epoch(epoch)
        return batches

    def read(batches: DataLoader[Any]) -> list[str]:
        return sorted(key for batch in batches for key in batch)

    batches, state = new(1), {}
    for _ in batches:
        state = batches.state_dict()
    if is_exhausted:
        state = batches.state_dict()
    resumed, following = new(1), new(2)
    resumed.load_state_dict(state)
    following.load_state_dict(state)
    assert read(resumed) == []
    assert read(resumed) == keys
    assert read(following) == keys


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_state_resumes_without_workers(bucket: Bucket, kind: type[Any]) -> None:
    pytest.importorskip("torchdata")
    keys = bucket.fill(42)
    batches = build(kind, bucket, 2)
    with reading(batches) as stream:
        read = [key for batch in islice(stream, 5) for key in batch]
        state = json.loads(json.dumps(merge_states([batches.state_dict()])))
    other = build(kind, bucket, 0)
    (other.sampler if kind is MapDataset else other.dataset).load_state_dict(state)
    read += [key for batch in other for key in batch]
    assert sorted(read) == keys


def test_records_are_read_once_over_a_change_of_workers(bucket: Bucket) -> None:
    """Also those that waited in the shuffle buffers, and in objects that were half read."""
    pytest.importorskip("torchdata")
    for number in range(6):
        bucket.put(f"{number}", b"".join(b"%d-%02d\n" % (number, line) for line in range(15)))
    options = {"records": lines_of, "shuffle": True, "shuffle_buffer": 8}
    common = {"batch_size": 4, "start_method": "fork", "resumable": True, "collate_fn": list}
    batches = loader(IterableDataset(bucket.uri, **options), num_workers=2, **common)
    with reading(batches) as stream:
        read = [line for batch in islice(stream, 9) for line in batch]
        state = json.loads(json.dumps(merge_states([batches.state_dict()])))
    dataset = IterableDataset(bucket.uri, **options)
    dataset.load_state_dict(state)
    with reading(loader(dataset, num_workers=1, **common)) as stream:
        read += [line for batch in stream for line in batch]
    assert sorted(read) == [f"{number}-{line:02d}" for number in range(6) for line in range(15)]


def test_a_state_between_snapshots_does_not_merge(bucket: Bucket) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    bucket.fill(20)
    batches = stateful.StatefulDataLoader(
        IterableDataset(bucket.uri, transform=key_of),
        num_workers=1,
        snapshot_every_n_steps=4,
        multiprocessing_context="fork",
    )
    with reading(batches) as stream:
        list(islice(stream, 6))
        with pytest.raises(ValueError, match="snapshot_every_n_steps=1"):
            merge_states([batches.state_dict()])


def test_a_plain_loaders_dataset_does_not_know_what_workers_read(bucket: Bucket) -> None:
    bucket.fill(8)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    with reading(DataLoader(dataset, num_workers=1, multiprocessing_context="fork")) as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="StatefulDataLoader"):
            dataset.state_dict()


def test_a_state_loaded_after_workers_started_is_an_error(bucket: Bucket) -> None:
    bucket.fill(8)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    state = dataset.state_dict()
    batches = loader(dataset, num_workers=1, start_method="fork")
    list(batches)
    dataset.load_state_dict(state)
    with (
        reading(batches) as stream,
        pytest.raises(RuntimeError, match="before you build the DataLoader"),
    ):
        list(stream)


def test_a_loaded_state_is_for_one_iteration_of_each_worker(bucket: Bucket) -> None:
    keys = bucket.fill(12)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    read = list(islice(stream := iter(dataset), 5))
    stream.close()
    other = IterableDataset(bucket.uri, transform=key_of)
    other.load_state_dict(dataset.state_dict())
    batches = DataLoader(other, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(read + list(batches)) == keys
    assert sorted(batches) == keys


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_persistent_workers_learn_of_the_epoch(bucket: Bucket, start: str) -> None:
    keys = bucket.fill(30)
    dataset = IterableDataset(
        bucket.uri, transform=key_of, shuffle=True, endpoint_url=bucket.server.url
    )
    batches = loader(dataset, batch_size=None, num_workers=1, start_method=start)
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        epochs.append(list(batches))
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == keys
    dataset.set_epoch(1)
    assert list(dataset) == epochs[1]
    assert dataset.stats.num_objects == 90


@pytest.mark.parametrize("tail", ["pad", "uneven", "drop"])
def test_a_sampler_shares_indices_among_ranks(bucket: Bucket, tail: Any) -> None:
    keys = bucket.fill(11)
    dataset = MapDataset(bucket.uri, transform=key_of)
    samplers = [
        ObjectSampler(dataset, shuffle=True, tail=tail, rank=rank, world_size=3)
        for rank in range(3)
    ]
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    read = sorted(keys[index] for share in shares for index in share)
    if tail == "uneven":
        assert read == keys
    else:
        assert len({len(share) for share in shares}) == 1
        assert len(read) == {"pad": 12, "drop": 9}[tail]


@pytest.mark.clouds("gs")
def test_the_next_batches_are_prefetched_without_workers(bucket: Bucket) -> None:
    bucket.fill(6)
    bucket.server.network = Network(latency_seconds=0.2)
    batches = loader(MapDataset(bucket.uri, transform=key_of), batch_size=2, num_threads=0)
    assert list(batches) == [["000", "001"], ["002", "003"], ["004", "005"]]
    assert bucket.server.stats.operation("objects.get").peak_in_flight > 2


def test_samples_need_no_collate_function(bucket: Bucket) -> None:
    bucket.fill(3)
    (batch,) = loader(MapDataset(bucket.uri), batch_size=3, num_workers=0)
    assert [type(each) for each in batch] == [Sample] * 3


def test_random_numbers_of_workers_repeat_by_seed_and_differ_by_worker(bucket: Bucket) -> None:
    """Of random, NumPy and torch alike."""
    bucket.fill(2)
    rolls = []
    for seed in (1, 1, 2):
        dataset = IterableDataset(bucket.uri, transform=dice_of)
        batches = loader(dataset, batch_size=None, num_workers=2, seed=seed, start_method="fork")
        rolls.append(sorted(batches))
    assert rolls[0] == rolls[1] != rolls[2]
    first, second = rolls[0]
    assert all(one != other for one, other in zip(first, second, strict=True))


def fail_to_start(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id}")


def test_parameters_of_workers_are_passed_on(bucket: Bucket) -> None:
    bucket.fill(4)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    options: dict[str, Any] = {"num_workers": 1, "start_method": "fork"}
    batches = loader(dataset, **options, timeout=90, persistent_workers=False)
    assert (batches.timeout, batches.persistent_workers) == (90, False)
    with pytest.raises(ValueError, match="worker 0"):
        list(loader(dataset, **options, worker_init_fn=fail_to_start))
    with pytest.raises(TypeError, match="'timeou'"):
        loader(dataset, **options, timeou=90)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("multiprocessing_context", "pass start_method"),
        ("sampler", "pass shuffle, seed and tail"),
        ("batch_sampler", "pass batch_size"),
        ("generator", "pass seed"),
    ],
)
def test_a_parameter_of_dataloader_that_is_replaced_is_named(
    bucket: Bucket, name: str, replacement: str
) -> None:
    bucket.fill(1)
    with pytest.raises(TypeError, match=f"loader takes no {name}; {replacement}"):
        loader(MapDataset(bucket.uri), **{name: "spawn"})


def test_settings_without_effect_are_rejected(bucket: Bucket) -> None:
    bucket.fill(1)
    dataset = IterableDataset(bucket.uri)
    with pytest.raises(ValueError, match="pass shuffle and tail"):
        loader(dataset, shuffle=True)
    with pytest.raises(ValueError, match="prefetch_factor must be 1 or more, not 0"):
        loader(MapDataset(bucket.uri), num_workers=1, prefetch_factor=0)
    with pytest.raises(ValueError, match="no effect with num_workers=0"):
        loader(dataset, num_workers=0, prefetch_factor=3)
    with pytest.raises(ValueError, match="no effect with num_workers=0: leave out start_method"):
        loader(dataset, num_workers=0, start_method="fork")
    with pytest.raises(ValueError, match="no effect with num_workers=0: leave out timeout"):
        loader(dataset, num_workers=0, timeout=3)
    with pytest.raises(ValueError, match="no effect with num_threads=2: leave out timeout"):
        loader(dataset, num_threads=2, timeout=3)
