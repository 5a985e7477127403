"""Plans of the ranges of a read and of the parts of an upload. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from aioflux.options import TransferOptions

MAX_GAP_BYTES = 1024 * 1024
"""Largest gap between two ranges that is read and dropped to save a request. At 50 MB/s, one
connection receives 1 MiB in one round trip of 20 ms. zarr and object_store have the same
default."""


def plan_ranges(start: int, end: int, range_size_bytes: int) -> list[tuple[int, int]]:
    """Cut `[start, end)` into ranges of `range_size_bytes`, the last one shorter."""
    return [
        (first, min(first + range_size_bytes, end)) for first in range(start, end, range_size_bytes)
    ]


class MergedRange(NamedTuple):
    """A range that is read in place of several requested ranges."""

    start: int
    """First byte."""
    end: int
    """One past the last byte."""
    members: list[int]
    """Indices of the requested ranges within it, sorted by their first bytes."""


def coalesce_ranges(
    ranges: Sequence[tuple[int, int]], *, max_gap_bytes: int, max_merged_bytes: int
) -> list[MergedRange]:
    """Merge ranges that overlap, or whose gap is small.

    Args:
        ranges: Half-open ranges `(start, end)`, in any order.
        max_gap_bytes: Largest gap between two ranges that are merged.
        max_merged_bytes: Largest size of a merged range, unless one requested range alone is
            larger.

    Returns:
        The merged ranges, sorted by their first bytes. Each index of `ranges` is a member of one.
    """
    plan: list[MergedRange] = []
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, end = ranges[index]
        if plan:
            last = plan[-1]
            merged_end = max(last.end, end)
            is_near = start - last.end <= max_gap_bytes
            if end <= last.end or (is_near and merged_end - last.start <= max_merged_bytes):
                last.members.append(index)
                plan[-1] = last._replace(end=merged_end)
                continue
        plan.append(MergedRange(start, end, [index]))
    return plan


def plan_part_size(number: int, part_size_bytes: int) -> int:
    """Return the size of part `number`, from 1, in bytes.

    The size doubles every 900 parts, so that an object of 5 TiB, the largest of GCS, needs fewer
    than 10,000 parts with any `part_size_bytes`: with 5 MiB, 9,900 parts have 900 x 5 MiB x (1 + 2
    + ... + 2^10) = 8.8 TiB.
    """
    return min(part_size_bytes << ((number - 1) // 900), 5 * 1024**3)


class SizeEstimate:
    """A moving mean of object sizes, for the first ranges of objects of unknown size.

    A read acquires the bytes of its first range from the byte budget. The first range is a quarter
    larger than the mean, so that it has all of an object if the objects are of similar sizes. It is
    at most `range_size_bytes`, and otherwise at least half of one request's share of the byte
    budget. The other half is for objects that wait for the consumer, so that a first range of this
    size delays no other request.

    Attributes:
        is_known: Whether at least one size was added.
        num_bytes: The mean, in bytes; 0 before any size is known.
        first_range_bytes: Size of the first range of an object.
    """

    def __init__(self, options: TransferOptions) -> None:
        self.is_known = False
        self.num_bytes = 0
        self._mean = 0.0
        self._most = options.range_size_bytes
        share = options.max_in_flight_bytes // (2 * options.max_in_flight)
        self._least = min(max(share, 1), self._most)
        self.first_range_bytes = self._least

    def add(self, num_bytes: int) -> None:
        """Add the size of an object: the first is the mean, each later one weighs an eighth."""
        if num_bytes != self._mean:
            self._mean += (num_bytes - self._mean) / (8 if self.is_known else 1)
            self.num_bytes = mean = int(self._mean)
            self.first_range_bytes = min(max(mean + mean // 4, self._least), self._most)
        self.is_known = True
