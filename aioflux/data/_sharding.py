"""Who reads what: plain functions of counts and sizes, so that ranks and workers agree in silence.

positions of a listing, in the order of the epoch
  -> tail: as many for each rank          (drop | pad | uneven)
  -> dealt to the ranks, and by each rank to its workers      (count | bytes)
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Reader", "ShardBy", "Tail", "check_rank", "rank_from_environment", "shard"]

Tail: TypeAlias = Literal["drop", "pad", "uneven"]
ShardBy: TypeAlias = Literal["count", "bytes"]


@dataclass(frozen=True, slots=True)
class Reader:
    """One of all that share the objects: a worker of a rank, or a rank that reads by itself."""

    rank: int = 0
    """Rank of the process, from 0."""
    world_size: int = 1
    """Number of ranks."""
    worker_id: int = 0
    """Worker within the rank, from 0."""
    num_workers: int = 1
    """Workers of each rank; 1 where the rank reads by itself."""


def shard(
    num_objects: int, reader: Reader, *, tail: Tail, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the places, in the order of an epoch, that one reader reads, ascending.

    By count, a rank takes every `world_size`-th object and its workers deal these out in turn: what
    a rank reads depends on no number of workers, and the workers together read it nearly in order.

    By bytes, each `world_size` objects in a row go one to each rank, the largest to the rank that
    has the fewest bytes so far: ranks have equally many objects, and their bytes differ by no more
    than the largest object. The workers of a rank share alike. With `tail="uneven"` each object
    goes to whoever has the fewest bytes so far, so that also the counts may differ.

    Args:
        num_objects: How many there are.
        reader: Whose share.
        tail: What becomes of a number of objects that is no multiple of `world_size`: the last ones
            are dropped; or the first ones are read again, as places from `num_objects` on, which
            stand for the places from 0; or some ranks read one more.
        sizes: Size of each in this order, in bytes, to share by bytes; by count where it is None.
    """
    total = _total(num_objects, reader.world_size, tail)
    if sizes is None:
        places = torch.arange(min(reader.rank, total), total, reader.world_size)
        return places[reader.worker_id :: reader.num_workers]
    deal = _fewest_first if tail == "uneven" else _in_rounds
    mine = deal(
        list(range(total)),
        [sizes[place % num_objects] for place in range(total)],
        reader.rank,
        reader.world_size,
    )
    mine = deal(
        mine,
        [sizes[place % num_objects] for place in mine],
        reader.worker_id,
        reader.num_workers,
    )
    return torch.tensor(mine, dtype=torch.int64)


def _total(num_objects: int, world_size: int, tail: Tail) -> int:
    if tail == "uneven":
        return num_objects
    over = num_objects % world_size
    return (
        num_objects - over if tail == "drop" else num_objects + (world_size - over if over else 0)
    )


def _in_rounds(places: list[int], sizes: list[int], index: int, num_shares: int) -> list[int]:
    """Deal one to each share in every round; the last round may be short."""
    if num_shares == 1:
        return places
    held = [0] * num_shares
    mine = []
    for start in range(0, len(places), num_shares):
        largest_first = sorted(range(start, min(start + num_shares, len(places))), key=_size(sizes))
        emptiest_first = sorted(range(num_shares), key=held.__getitem__)
        for each, share in zip(largest_first, emptiest_first, strict=False):
            held[share] += sizes[each]
            if share == index:
                mine.append(places[each])
    return mine


def _size(sizes: list[int]) -> Callable[[int], int]:
    return lambda each: -sizes[each]


def _fewest_first(places: list[int], sizes: list[int], index: int, num_shares: int) -> list[int]:
    """Deal each to the share that holds the fewest bytes."""
    if num_shares == 1:
        return places
    held = [(0, share) for share in range(num_shares)]
    mine = []
    for place, size in zip(places, sizes, strict=True):
        num_bytes, share = held[0]
        heapreplace(held, (num_bytes + size, share))
        if share == index:
            mine.append(place)
    return mine


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
