"""Shards are disjoint, complete, balanced and in order, for any number of ranks and workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux.data._sharding import check_rank, rank_from_environment, shard

COUNTS = st.integers(0, 300)
RANKS = st.integers(1, 9)
WORKERS = st.integers(1, 9)


@given(COUNTS, RANKS, WORKERS)
def test_shards_are_disjoint_and_complete(count: int, world_size: int, num_workers: int) -> None:
    read = [
        index
        for rank in range(world_size)
        for worker_id in range(num_workers)
        for index in shard(
            count,
            rank=rank,
            world_size=world_size,
            worker_id=worker_id,
            num_workers=num_workers,
        )
    ]
    assert sorted(read) == list(range(count))


@given(COUNTS, RANKS, WORKERS, st.data())
def test_what_a_rank_reads_depends_on_no_number_of_workers(
    count: int, world_size: int, num_workers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    alone = shard(count, rank=rank, world_size=world_size)
    shared = [
        index
        for worker_id in range(num_workers)
        for index in shard(
            count,
            rank=rank,
            world_size=world_size,
            worker_id=worker_id,
            num_workers=num_workers,
        )
    ]
    assert sorted(shared) == list(alone)


@given(COUNTS, RANKS)
def test_two_ranks_differ_by_one_object_at_most(count: int, world_size: int) -> None:
    sizes = {len(shard(count, rank=rank, world_size=world_size)) for rank in range(world_size)}
    assert max(sizes) - min(sizes) <= 1


@given(COUNTS, RANKS, WORKERS)
def test_a_shard_is_in_the_order_of_the_listing(
    count: int, world_size: int, num_workers: int
) -> None:
    share = shard(count, rank=0, world_size=world_size, worker_id=0, num_workers=num_workers)
    assert list(share) == sorted(share)


def test_nothing_given_is_no_rank() -> None:
    assert check_rank(None, None) is None


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0)],
    ids=["no-world", "no-rank", "too-high", "negative", "empty-world"],
)
def test_a_rank_outside_its_world_is_refused(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ValueError, match="world_size"):
        check_rank(rank, world_size)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "", "WORLD_SIZE": ""}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
    ],
    ids=["unset", "empty", "set"],
)
def test_the_environment_tells_the_rank(
    environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    assert rank_from_environment(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x"}],
    ids=["no-world", "no-rank", "too-high", "no-number"],
)
def test_half_a_rank_in_the_environment_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="the environment says RANK="):
        rank_from_environment(environment)
