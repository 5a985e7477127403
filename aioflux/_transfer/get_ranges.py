"""Reads of several ranges of one object, of which near ones are merged.

ranges -> coalesce_ranges -> merged ranges -> fetch_range of each, pinned -> slices, in order
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aioflux._concurrency.fan_out import bounded_map
from aioflux._transfer.get import fetch_pinned, fetch_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["MAX_GAP_BYTES", "MergedRange", "coalesce_ranges", "fetch_ranges"]

MAX_GAP_BYTES = 1024 * 1024
"""Largest gap between two ranges that is read and dropped to save a request: what one connection
receives in the time of a round trip, 20 ms at 50 MB/s. zarr and object_store have this default."""


class MergedRange(NamedTuple):
    """One range that covers several."""

    start: int
    """First byte."""
    end: int
    """One past the last byte."""
    members: list[int]
    """Indices of the ranges that it covers, by their first bytes."""


def coalesce_ranges(
    ranges: Sequence[tuple[int, int]], *, max_gap_bytes: int, max_merged_bytes: int
) -> list[MergedRange]:
    """Merge ranges that overlap or are close together.

    Args:
        ranges: Half-open ranges `(start, end)`, in any order.
        max_gap_bytes: Largest gap between two ranges that are merged.
        max_merged_bytes: Largest range that merging makes; a larger one stays as it is.

    Returns:
        The merged ranges by their first bytes; each index of `ranges` is a member of one.
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


async def fetch_ranges(
    session: Session,
    key: str,
    ranges: Sequence[tuple[int, int]],
    *,
    max_gap_bytes: int,
    meta: ObjectMeta | None,
) -> list[bytes]:
    """Read ranges of one generation of an object, each merged range verified as by `fetch_range`.

    Raises:
        ChecksumError: The bytes of a merged range never matched.
        NotFoundError: No object has this key, or not in the generation of `meta`.
        PreconditionFailedError: The object was replaced each time while it was read by name.
    """
    plan = coalesce_ranges(
        ranges, max_gap_bytes=max_gap_bytes, max_merged_bytes=session.options.range_size_bytes
    )
    if meta is not None or len(plan) <= 1:
        return await _read_plan(session, key, ranges, plan, meta)
    return await fetch_pinned(
        session, key, lambda found: _read_plan(session, key, ranges, plan, found)
    )


async def _read_plan(
    session: Session,
    key: str,
    ranges: Sequence[tuple[int, int]],
    plan: Sequence[MergedRange],
    meta: ObjectMeta | None,
) -> list[bytes]:
    results = [b""] * len(ranges)

    async def read(merged: MergedRange) -> None:
        data = await fetch_range(session, key, start=merged.start, end=merged.end, meta=meta)
        for index in merged.members:
            start, end = ranges[index]
            # A range that was not merged is not copied: a slice of all of `data` is `data` itself.
            results[index] = data[start - merged.start : end - merged.start]

    max_in_flight = session.options.max_in_flight
    async for _ in bounded_map(read, plan, max_in_flight=max_in_flight, ordered=False):
        pass
    return results
