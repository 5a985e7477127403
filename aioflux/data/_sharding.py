"""Sharding of the objects of an epoch among ranks and workers.

Pure functions of counts and sizes: every reader computes the same shares without communication.

objects, by epoch_index
  -> the last are dropped, or the first repeated, or neither   (tail: drop | pad | uneven)
  -> shared among ranks, then among the workers of each rank   (shard_by: count | bytes)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Literal, TypeAlias

import torch

Tail: TypeAlias = Literal["drop", "pad", "uneven"]
ShardBy: TypeAlias = Literal["count", "bytes"]


@dataclass(frozen=True, slots=True)
class Reader:
    """One worker of one rank, or a rank without workers.

    The repr is part of the seed of shuffle buffers: never rename or reorder the fields.
    """

    rank: int = 0
    """Rank of the process, from 0."""
    world_size: int = 1
    """Number of ranks."""
    worker_id: int = 0
    """Worker within the rank, from 0."""
    num_workers: int = 1
    """Number of workers of each rank; 1 for a rank without workers."""


def shard(
    num_objects: int, reader: Reader, *, tail: Tail, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the epoch indices that one reader reads, ascending.

    Without `sizes`, objects are shared by count. A rank reads every `world_size`-th object, and its
    workers read these objects round-robin. So the objects of a rank do not depend on its number of
    workers, and are read nearly in order.

    With `sizes`, objects are shared by bytes, in rounds of `world_size` objects. In each round
    every rank is assigned one object; the rank with the fewest bytes so far is assigned the
    largest. Ranks have the same number of objects, and their bytes differ by at most the largest
    object. The workers of a rank share its objects in the same way. With `tail="uneven"` there are
    no rounds: each object is assigned to the rank with the fewest bytes so far.

    Args:
        num_objects: Number of objects in the epoch.
        reader: Reader whose share is returned.
        tail: Treatment of the last objects if `num_objects` is not a multiple of `world_size`.
            "drop" leaves them out. "pad" repeats the first objects: index `i` means index
            `i % num_objects`. With "uneven" some ranks may read more objects than others; without
            `sizes`, one object more.
        sizes: Size in bytes by epoch_index, to share by bytes; None shares by count.
    """
    total = _padded_or_dropped(num_objects, reader.world_size, tail)
    if sizes is None:
        epoch_indices = torch.arange(min(reader.rank, total), total, reader.world_size)
        return epoch_indices[reader.worker_id :: reader.num_workers]
    assign = _to_smallest if tail == "uneven" else _in_rounds
    of_rank = assign(
        list(range(total)),
        [sizes[index % num_objects] for index in range(total)],
        reader.rank,
        reader.world_size,
    )
    of_reader = assign(
        of_rank,
        [sizes[index % num_objects] for index in of_rank],
        reader.worker_id,
        reader.num_workers,
    )
    return torch.tensor(of_reader, dtype=torch.int64)


def _padded_or_dropped(num_objects: int, world_size: int, tail: Tail) -> int:
    if tail == "uneven":
        return num_objects
    remainder = num_objects % world_size
    if tail == "drop" or not remainder:
        return num_objects - remainder
    return num_objects + world_size - remainder


def _in_rounds(indices: list[int], sizes: list[int], share: int, num_shares: int) -> list[int]:
    """Return one share, with one object of every round; the last round may be short."""
    if num_shares == 1:
        return indices
    share_bytes = [0] * num_shares
    assigned = []
    for start in range(0, len(indices), num_shares):
        end = min(start + num_shares, len(indices))
        largest_first = sorted(range(start, end), key=sizes.__getitem__, reverse=True)
        smallest_first = sorted(range(num_shares), key=share_bytes.__getitem__)
        for number, receiver in zip(largest_first, smallest_first, strict=False):
            share_bytes[receiver] += sizes[number]
            if receiver == share:
                assigned.append(indices[number])
    return assigned


def _to_smallest(indices: list[int], sizes: list[int], share: int, num_shares: int) -> list[int]:
    """Return one share, assigning each object to the share with the fewest bytes so far."""
    if num_shares == 1:
        return indices
    share_bytes = [(0, number) for number in range(num_shares)]
    assigned = []
    for index, size in zip(indices, sizes, strict=True):
        num_bytes, receiver = share_bytes[0]
        heapreplace(share_bytes, (num_bytes + size, receiver))
        if receiver == share:
            assigned.append(index)
    return assigned


def check_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return `rank` and `world_size` after a check, or None if both are None.

    Raises:
        ValueError: Only one of them is None, or `rank` is negative or not below `world_size`.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank!r} and world_size={world_size!r}: pass both or neither")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 or more and below world_size={world_size}, not {rank}")
    return rank, world_size


def rank_from_environment(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and world_size that `torchrun` sets for its processes; None if it sets none.

    Args:
        environment: `os.environ`; RANK and WORLD_SIZE are read.

    Raises:
        ValueError: Only one of the variables is set, or a value is not valid. With a default of
            rank 0 of 1, every rank would read all objects.
    """
    texts = environment.get("RANK"), environment.get("WORLD_SIZE")
    try:
        rank, world_size = (int(text) if text else None for text in texts)
        return check_rank(rank, world_size)
    except ValueError as exc:
        raise ValueError(
            f"the environment says RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r}, which is not a "
            f"valid rank: {exc}; set both variables, or pass rank= and world_size="
        ) from exc
