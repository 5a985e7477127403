"""Who reads what: a plain function of counts, so that ranks and workers agree without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_rank", "rank_from_environment", "shard"]


def shard(
    num_objects: int, *, rank: int, world_size: int, worker_id: int = 0, num_workers: int = 1
) -> range:
    """Return the positions, in a sorted listing, that one worker of one rank reads.

    A rank takes every `world_size`-th object and its workers deal these out in turn: what a rank
    reads depends on no number of workers, and the workers together read it nearly in the order of
    the listing. All shards together are the listing, no two overlap, and the counts of two ranks
    differ by one at most, as do those of two workers of a rank.

    Args:
        num_objects: Length of the listing.
        rank: Rank of this process, from 0.
        world_size: Number of ranks.
        worker_id: Worker within the rank, from 0.
        num_workers: Workers of each rank; 1 where the rank reads by itself.
    """
    return range(rank, num_objects, world_size)[worker_id::num_workers]


def check_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return a rank and world_size that were given, or None where neither was.

    Raises:
        ValueError: One was given without the other, or they cannot be together.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank!r} and world_size={world_size!r}: give both or neither")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 or more and below world_size={world_size}, not {rank}")
    return rank, world_size


def rank_from_environment(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and world_size that `torchrun` tells its processes, or None where it did not.

    Args:
        environment: `os.environ`; RANK and WORLD_SIZE are read.

    Raises:
        ValueError: One is set without the other, or they are no such numbers. To go on as the only
            rank would mean that every rank reads everything.
    """
    given = environment.get("RANK"), environment.get("WORLD_SIZE")
    try:
        rank, world_size = (int(text) if text else None for text in given)
        return check_rank(rank, world_size)
    except ValueError as exc:
        raise ValueError(
            f"the environment says RANK={given[0]!r} and WORLD_SIZE={given[1]!r}, which is no "
            f"place among ranks: {exc}; set both, or pass rank= and world_size="
        ) from exc
