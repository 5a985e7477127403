"""Sharding: plain functions of counts and sizes, so that ranks and workers agree without messages.

objects, by epoch_index
  -> tail: the same number for each rank                      (drop | pad | uneven)
  -> shared among the ranks, and by each rank among its workers   (count | bytes)
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Reader", "ShardBy", "Tail", "check_rank", "rank_from_environment", "shard"]

Tail: TypeAlias = Literal["drop", "pad", "uneven"]
ShardBy: TypeAlias = Literal["count", "bytes"]


@dataclass(frozen=True, slots=True)
class Reader:
    """One of those that share the objects: a worker of a rank, or a rank without workers.

    Its repr is part of the seed of shuffle buffers: names and order of its fields stay.
    """

    rank: int = 0
    """Rank of the process, from 0."""
    world_size: int = 1
    """Number of ranks."""
    worker_id: int = 0
    """Worker within the rank, from 0."""
    num_workers: int = 1
    """Workers of each rank; 1 if the rank has none."""


def shard(
    num_objects: int, reader: Reader, *, tail: Tail, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the epoch indices that one reader reads, ascending.

    By count, a rank reads every `world_size`-th object and its workers share these in turn: what a
    rank reads is independent of the number of workers, and these together read it nearly in order.

    By bytes, each `world_size` objects in a row go one to each rank, the largest to the rank that
    has the fewest bytes so far: ranks have the same number of objects, and their bytes differ by no
    more than the largest object. The workers of a rank share in the same way. With
    `tail="uneven"` each object goes to the rank with the fewest bytes so far, so that counts may
    differ, too.

    Args:
        num_objects: Number of objects.
        reader: Reader of the share.
        tail: How to treat a number of objects that is no multiple of `world_size`: "drop" the last
            ones; "pad" by reading the first ones again, as indices from `num_objects` on, which
            mean the indices from 0; or "uneven", so that some ranks read one more.
        sizes: Size of each in this order, in bytes, to share by bytes; by count if None.
    """
    total = _padded_or_dropped(num_objects, reader.world_size, tail)
    if sizes is None:
        epoch_indices = torch.arange(min(reader.rank, total), total, reader.world_size)
        return epoch_indices[reader.worker_id :: reader.num_workers]
    share_out = _to_smallest if tail == "uneven" else _in_rounds
    own = share_out(
        list(range(total)),
        [sizes[index % num_objects] for index in range(total)],
        reader.rank,
        reader.world_size,
    )
    own = share_out(
        own, [sizes[index % num_objects] for index in own], reader.worker_id, reader.num_workers
    )
    return torch.tensor(own, dtype=torch.int64)


def _padded_or_dropped(num_objects: int, world_size: int, tail: Tail) -> int:
    if tail == "uneven":
        return num_objects
    over = num_objects % world_size
    return (
        num_objects - over if tail == "drop" else num_objects + (world_size - over if over else 0)
    )


def _in_rounds(indices: list[int], sizes: list[int], share: int, num_shares: int) -> list[int]:
    """Return one share, if each gets one object in every round; the last round may be short."""
    if num_shares == 1:
        return indices
    share_bytes = [0] * num_shares
    own = []
    for start in range(0, len(indices), num_shares):
        end = min(start + num_shares, len(indices))
        largest_first = sorted(range(start, end), key=sizes.__getitem__, reverse=True)
        smallest_first = sorted(range(num_shares), key=share_bytes.__getitem__)
        for number, receiver in zip(largest_first, smallest_first, strict=False):
            share_bytes[receiver] += sizes[number]
            if receiver == share:
                own.append(indices[number])
    return own


def _to_smallest(indices: list[int], sizes: list[int], share: int, num_shares: int) -> list[int]:
    """Return one share, if each object goes to the share that has the fewest bytes."""
    if num_shares == 1:
        return indices
    share_bytes = [(0, number) for number in range(num_shares)]
    own = []
    for index, size in zip(indices, sizes, strict=True):
        num_bytes, receiver = share_bytes[0]
        heapreplace(share_bytes, (num_bytes + size, receiver))
        if receiver == share:
            own.append(index)
    return own


def check_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return a rank and world_size that were given, or None if neither was.

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
    """Return the rank and world_size that `torchrun` sets for its processes, or None without it.

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
            f"rank of a job: {exc}; set both, or pass rank= and world_size="
        ) from exc
