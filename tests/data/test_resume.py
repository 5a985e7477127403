"""An epoch goes on from any sample, also with other numbers of ranks and workers."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.data import IterableDataset, merge_states
from aioflux.data._resume import Phase, RemainingRecords, ShareProgress, plan_share
from aioflux.data._sharding import Reader
from tests.data.transforms import key_of, lines_of

if TYPE_CHECKING:
    from aioflux.data._sharding import Tail
    from tests.data.conftest import Bucket

TOPOLOGIES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4)


def some_sizes(listing_indexs: torch.Tensor) -> list[int]:
    return [1 + listing_index % 7 for listing_index in listing_indexs.tolist()]


@settings(max_examples=25)
@given(st.integers(0, 40), TOPOLOGIES, st.sampled_from(["count", "bytes"]), st.data())
def test_each_object_is_read_once_over_any_changes_of_readers(
    count: int, topologies: list[tuple[int, int]], by: str, data: st.DataObject
) -> None:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    phases: tuple[Phase, ...] = ()
    read: list[int] = []
    for number, (world_size, num_workers) in enumerate(topologies):
        readers = {}
        for rank in range(world_size):
            for worker_id in range(num_workers):
                past, share, progress = plan_share(
                    order,
                    phases,
                    Reader(rank, world_size, worker_id, num_workers),
                    tail="uneven",
                    sizes=some_sizes if by == "bytes" else None,
                )
                remaining = [index for index, _ in progress.remaining(share)]
                is_last = number == len(topologies) - 1
                order_of_arrival = data.draw(st.permutations(remaining)) if remaining else []
                num_read = len(remaining) if is_last else data.draw(st.integers(0, len(remaining)))
                for index in order_of_arrival[:num_read]:
                    progress.mark_started(index)
                    read.append(int(share.listing_indices[index]))
                readers[rank, worker_id] = ShareProgress.unpack(progress.pack())
        phases = (*past, Phase(world_size, num_workers, readers))
    assert sorted(read) == list(range(count))


@settings(max_examples=25)
@given(st.integers(1, 12), TOPOLOGIES, st.data())
def test_each_record_is_read_once_over_any_changes_of_readers(
    count: int, topologies: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Objects have five records; some are read out of turn, as from a shuffle buffer."""
    phases: tuple[Phase, ...] = ()
    read: Counter[tuple[int, int]] = Counter()
    for number, (world_size, num_workers) in enumerate(topologies):
        readers = {}
        for rank in range(world_size):
            for worker_id in range(num_workers):
                reader = Reader(rank, world_size, worker_id, num_workers)
                past, share, progress = plan_share(
                    torch.arange(count), phases, reader, tail="uneven"
                )
                for share_index, remaining in list(progress.remaining(share)):
                    if number < len(topologies) - 1 and data.draw(st.booleans()):
                        continue
                    records = [each for each in range(5) if remaining.has(each)]
                    first = data.draw(st.integers(0, 5))
                    if number == len(topologies) - 1:
                        first = 5
                    waits = {each for each in records if each < first and data.draw(st.booleans())}
                    if number == len(topologies) - 1:
                        waits = set()
                    extra = tuple(
                        sorted(waits | {each for each in remaining.extra if each >= first})
                    )
                    progress.partial.pop(share_index, None)
                    progress.mark_started(share_index)
                    if extra or (remaining.first is not None and first < 5):
                        rest = None if remaining.first is None else max(first, remaining.first)
                        progress.partial[share_index] = RemainingRecords(rest, extra)
                    listing_index = int(share.listing_indices[share_index])
                    read.update(
                        (listing_index, each)
                        for each in records
                        if each < first and each not in waits
                    )
                readers[rank, worker_id] = ShareProgress.unpack(progress.pack())
        phases = (*past, Phase(world_size, num_workers, readers))
    assert read == Counter(
        (listing_index, each) for listing_index in range(count) for each in range(5)
    )


def build(bucket: Bucket, rank: int, world_size: int, **options: Any) -> IterableDataset[str]:
    options = {"transform": key_of, "shuffle": True, "seed": 7, "tail": "uneven", **options}
    return IterableDataset(bucket.uri, rank=rank, world_size=world_size, **options)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


@pytest.mark.clouds("gs", "s3", "az")
def test_a_stream_resumes_at_its_item(bucket: Bucket) -> None:
    bucket.fill(30)
    whole = list(build(bucket, 0, 1))
    dataset = build(bucket, 0, 1)
    stream = iter(dataset)
    read = list(islice(stream, 11))
    state = through_json(dataset.state_dict())
    stream.close()
    other = build(bucket, 0, 1)
    other.load_state_dict(state)
    assert read + list(other) == whole
    assert list(other) == whole, "the iteration after that reads a whole epoch"


def test_a_state_does_not_count_prefetched_samples(bucket: Bucket) -> None:
    keys = bucket.fill(30)
    dataset = build(bucket, 0, 1, shuffle=False)
    stream = iter(dataset)
    next(stream)
    bucket.server.stats.reset()
    next(stream)
    other = build(bucket, 0, 1, shuffle=False)
    other.load_state_dict(dataset.state_dict())
    assert list(other) == keys[2:]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("shard_by", ["count", "bytes"])
def test_an_epoch_resumes_with_another_number_of_ranks(
    bucket: Bucket, shard_by: str, ordered: bool
) -> None:
    keys = bucket.fill(41)
    options = {"shard_by": shard_by, "ordered": ordered}
    read: list[str] = []
    state: dict[str, Any] | None = None
    for world_size, each_reads in ((4, 3), (3, 2), (5, 100)):
        states = []
        for rank in range(world_size):
            dataset = build(bucket, rank, world_size, **options)
            dataset.set_epoch(3)
            if state is not None:
                dataset.load_state_dict(state)
            stream = iter(dataset)
            read += islice(stream, each_reads)
            stream.close()
            states.append(dataset.state_dict())
        state = through_json(merge_states(states))
    assert sorted(read) == keys


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_ranks_stay_in_step_when_their_number_changes(bucket: Bucket, tail: Tail) -> None:
    keys = bucket.fill(23)
    read, states = [], []
    for rank in range(2):
        dataset = build(bucket, rank, 2, tail=tail)
        read += islice(iter(dataset), 4)
        states.append(dataset.state_dict())
    rests = []
    for rank in range(4):
        dataset = build(bucket, rank, 4, tail=tail)
        dataset.load_state_dict(merge_states(states))
        rests.append(list(dataset))
    assert len({len(rest) for rest in rests}) == 1
    counts = Counter(read + [key for rest in rests for key in rest])
    if tail == "pad":
        assert set(counts) == set(keys)
        assert counts.total() <= len(keys) + 3
    else:
        assert max(counts.values()) == 1
        assert counts.total() >= len(keys) - 3


def test_records_resume_within_an_object(bucket: Bucket) -> None:
    for number in range(4):
        bucket.put(f"{number}", b"".join(b"%d-%d\n" % (number, line) for line in range(6)))
    options = {"records": lines_of, "transform": None, "shuffle_buffer": 4}
    read, states = [], []
    for rank in range(2):
        dataset = build(bucket, rank, 2, **options)
        stream = iter(dataset)
        read += islice(stream, 5)
        stream.close()
        states.append(through_json(dataset.state_dict()))
    for rank in range(3):
        dataset = build(bucket, rank, 3, **options)
        dataset.load_state_dict(merge_states(states))
        read += list(dataset)
    assert Counter(read) == Counter(f"{n}-{line}" for n in range(4) for line in range(6))


def test_a_shuffle_buffer_mixes_records_of_objects(bucket: Bucket) -> None:
    for number in range(3):
        bucket.put(f"{number}", b"".join(b"%d-%d\n" % (number, line) for line in range(20)))
    plain = list(IterableDataset(bucket.uri, records=lines_of))
    mixed = list(IterableDataset(bucket.uri, records=lines_of, shuffle_buffer=30))
    assert sorted(mixed) == sorted(plain)
    assert mixed != plain
    assert mixed == list(IterableDataset(bucket.uri, records=lines_of, shuffle_buffer=30))


def test_a_shuffle_buffer_without_records_is_rejected(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(ValueError, match="no effect without records="):
        IterableDataset(bucket.uri, shuffle_buffer=10)


def test_a_state_of_other_numbers_must_be_merged(bucket: Bucket) -> None:
    bucket.fill(9)
    dataset = build(bucket, 0, 2)
    next(iter(dataset))
    other = build(bucket, 0, 3)
    other.load_state_dict(dataset.state_dict())
    with pytest.raises(ValueError, match=r"merge_states.*1 missing, first rank 1 worker 0"):
        iter(other)


def test_a_state_of_another_order_is_rejected(bucket: Bucket) -> None:
    bucket.fill(9)
    state = build(bucket, 0, 1).state_dict()
    with pytest.raises(ValueError, match=r"build the dataset with seed=7"):
        build(bucket, 0, 1, seed=8).load_state_dict(state)


def test_a_state_of_other_objects_is_rejected(bucket: Bucket) -> None:
    bucket.fill(9)
    state = build(bucket, 0, 1).state_dict()
    bucket.put("zzz", b"new")
    with pytest.raises(ValueError, match="save a manifest"):
        build(bucket, 0, 1).load_state_dict(state)


def test_something_else_is_no_state(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(ValueError, match="not a state of a dataset"):
        build(bucket, 0, 1).load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="is a state of a dataset"):
        merge_states([{"epoch": 1}])


def test_states_of_different_times_do_not_merge(bucket: Bucket) -> None:
    bucket.fill(9)
    states = []
    for rank, epoch in ((0, 1), (1, 2)):
        dataset = build(bucket, rank, 2)
        dataset.set_epoch(epoch)
        next(iter(dataset))
        states.append(dataset.state_dict())
    with pytest.raises(ValueError, match="epoch is 1 in one and 2"):
        merge_states(states)


def test_states_of_other_ranks_or_of_two_times_do_not_merge(bucket: Bucket) -> None:
    bucket.fill(9)

    def state_after(num_items: int, world_size: int) -> dict[str, Any]:
        dataset = build(bucket, 0, world_size)
        list(islice(iter(dataset), num_items))
        return dataset.state_dict()

    with pytest.raises(ValueError, match="one is of 2 x 1 ranks and workers, another of 3 x 1"):
        merge_states([state_after(1, 2), state_after(1, 3)])
    with pytest.raises(ValueError, match="two states of rank 0 worker 0 differ"):
        merge_states([state_after(1, 2), state_after(2, 2)])
    with pytest.raises(ValueError, match="snapshot_every_n_steps=1"):
        merge_states([{"worker_0": state_after(1, 2), "_steps_since_snapshot": 1}])


def test_states_of_ranks_that_have_not_started_merge(bucket: Bucket) -> None:
    bucket.fill(9)
    states = [build(bucket, rank, 2).state_dict() for rank in range(2)]
    assert merge_states(states) == states[0] == states[1]


def test_a_repeated_object_that_is_partly_read_is_not_read_again() -> None:
    """With `tail="pad"` rank 1 read object 0 as its second one: rank 0 has read all of it."""
    half_read = ShareProgress(2, set(), {1: RemainingRecords(3)})
    phase = Phase(2, 1, {(0, 0): ShareProgress(2), (1, 0): half_read})
    _, share, _ = plan_share(torch.arange(3), [phase], Reader(), tail="pad")
    assert share.listing_indices.tolist() == []


def test_resuming_in_another_epoch_than_that_of_the_state_is_rejected(bucket: Bucket) -> None:
    """It would leave out the rest of that epoch in silence."""
    bucket.fill(9)
    dataset = build(bucket, 0, 1)
    dataset.set_epoch(1)
    next(iter(dataset))
    other = build(bucket, 0, 1)
    other.load_state_dict(dataset.state_dict())
    other.set_epoch(2)
    with pytest.raises(ValueError, match=r"call set_epoch\(1\)"):
        iter(other)


def test_a_state_of_a_finished_epoch_starts_the_next_one(bucket: Bucket) -> None:
    keys = bucket.fill(9)
    dataset = build(bucket, 0, 1)
    dataset.set_epoch(1)
    assert sorted(dataset) == keys
    other = build(bucket, 0, 1)
    other.load_state_dict(dataset.state_dict())
    other.set_epoch(2)
    second = list(other)
    dataset.set_epoch(2)
    assert second == list(dataset)


def test_epochs_are_shuffled_alike_on_every_rank_and_unlike_each_other(bucket: Bucket) -> None:
    keys = bucket.fill(40)
    orders = []
    for epoch in range(2):
        dataset = build(bucket, 0, 1)
        dataset.set_epoch(epoch)
        orders.append(list(dataset))
        ranks = [build(bucket, rank, 2) for rank in range(2)]
        for each in ranks:
            each.set_epoch(epoch)
        assert [list(each) for each in ranks] == [orders[-1][::2], orders[-1][1::2]]
    assert sorted(orders[0]) == sorted(orders[1]) == keys
    assert len({*map(tuple, orders), tuple(keys)}) == 3


def test_a_pickle_resumes_too(bucket: Bucket) -> None:
    bucket.fill(9)
    dataset = build(bucket, 0, 1)
    whole = list(dataset)
    next(stream := iter(dataset))
    state = dataset.state_dict()
    stream.close()
    dataset.load_state_dict(state)
    assert list(pickle.loads(pickle.dumps(dataset))) == whole[1:]
