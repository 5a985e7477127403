"""Shards are disjoint, complete, balanced and in order, for any number of ranks and workers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux.data._sharding import Reader, Tail, check_rank, rank_from_environment, shard

COUNTS = st.integers(0, 300)
RANKS = st.integers(1, 9)
WORKERS = st.integers(1, 9)
TAILS = st.sampled_from(["drop", "pad", "uneven"])
SIZES = st.lists(st.integers(0, 1000), max_size=200)


def shares(
    count: int, world_size: int, num_workers: int, tail: Tail, sizes: list[int] | None = None
) -> list[list[list[int]]]:
    """The places of each worker of each rank."""
    return [
        [
            shard(
                count, Reader(rank, world_size, worker_id, num_workers), tail=tail, sizes=sizes
            ).tolist()
            for worker_id in range(num_workers)
        ]
        for rank in range(world_size)
    ]


def flat(lists: list[list[int]]) -> list[int]:
    return [each for one in lists for each in one]


@given(SIZES, RANKS, WORKERS, st.booleans())
def test_uneven_shards_are_disjoint_and_complete(
    sizes: list[int], world_size: int, num_workers: int, by_bytes: bool
) -> None:
    dealt = shares(len(sizes), world_size, num_workers, "uneven", sizes if by_bytes else None)
    assert sorted(flat([flat(rank) for rank in dealt])) == list(range(len(sizes)))


@given(SIZES, RANKS, WORKERS, st.booleans(), st.sampled_from(["drop", "pad"]))
def test_dropped_and_padded_shards_keep_ranks_in_step(
    sizes: list[int], world_size: int, num_workers: int, by_bytes: bool, tail: Tail
) -> None:
    """Also where each worker makes batches of its own: their workers' counts are the same, too."""
    dealt = shares(len(sizes), world_size, num_workers, tail, sizes if by_bytes else None)
    counts = {tuple(sorted(len(worker) for worker in rank)) for rank in dealt}
    assert len(counts) == 1
    places = Counter(place % max(len(sizes), 1) for rank in dealt for place in flat(rank))
    if tail == "pad":
        assert set(places) == set(range(len(sizes)))
        assert places.total() - len(sizes) < world_size
    else:
        assert set(places.values()) <= {1}
        assert len(sizes) - places.total() < world_size


@given(COUNTS, RANKS, WORKERS, TAILS)
def test_the_share_of_a_rank_is_independent_of_the_number_of_workers(
    count: int, world_size: int, num_workers: int, tail: Tail
) -> None:
    alone = shares(count, world_size, 1, tail)
    shared = shares(count, world_size, num_workers, tail)
    assert [sorted(flat(rank)) for rank in shared] == [flat(rank) for rank in alone]


@given(SIZES, RANKS, WORKERS, st.booleans(), TAILS)
def test_a_shard_is_ascending(
    sizes: list[int], world_size: int, num_workers: int, by_bytes: bool, tail: Tail
) -> None:
    dealt = shares(len(sizes), world_size, num_workers, tail, sizes if by_bytes else None)
    assert all(worker == sorted(worker) for rank in dealt for worker in rank)


@given(SIZES, RANKS, TAILS)
def test_bytes_of_ranks_differ_by_no_more_than_the_largest_object(
    sizes: list[int], world_size: int, tail: Tail
) -> None:
    dealt = shares(len(sizes), world_size, 1, tail, sizes)
    held = [sum(sizes[place % len(sizes)] for place in flat(rank)) for rank in dealt]
    assert max(held) - min(held) <= max(sizes, default=0)


@given(COUNTS, RANKS)
def test_counts_of_uneven_ranks_differ_by_one_at_most(count: int, world_size: int) -> None:
    counts = [len(flat(rank)) for rank in shares(count, world_size, 1, "uneven")]
    assert max(counts) - min(counts) <= 1


def test_without_arguments_the_rank_is_unknown() -> None:
    assert check_rank(None, None) is None


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0)],
    ids=["no-world", "no-rank", "too-high", "negative", "empty-world"],
)
def test_a_rank_outside_its_world_is_rejected(rank: int | None, world_size: int | None) -> None:
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
def test_the_rank_comes_from_the_environment(
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
