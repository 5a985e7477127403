"""Reads of objects and of slices of them; slices of one object are of one generation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aioflux.errors import NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

__all__ = ["cat_slices", "pair_slices"]

Slice: TypeAlias = tuple[int | None, int | None]
"""First byte and end, as in Python's own slices: negative ones count from the end."""

_MAX_READS: Final = 6
"""Reads of an object that is replaced between the request for its size and that for its bytes."""

_PAUSE_SECONDS: Final = 0.01
"""Longest pause before the second of these reads; it doubles with each, to 0.6 s in total."""

_NO_END: Final = 1 << 62
"""An end beyond that of any object."""


def pair_slices(paths: Any, starts: Any, ends: Any) -> list[tuple[Any, Slice]]:
    """Return each path that `cat_ranges` was given with its slice.

    Raises:
        TypeError: `paths` is no list.
        ValueError: The lists are not of one length.
    """
    if not isinstance(paths, list):
        raise TypeError(f"cat_ranges takes a list of paths, not {type(paths).__name__}")
    firsts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
    behinds = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
    if not len(paths) == len(firsts) == len(behinds):
        raise ValueError(
            f"cat_ranges was given {len(paths)} paths, {len(firsts)} starts and {len(behinds)} ends"
        )
    return list(zip(paths, zip(firsts, behinds, strict=True), strict=True))


def _plan_slice(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Return the range `[start, end)` of a slice of `size` bytes."""
    first, behind, _ = slice(start, end).indices(size)
    return first, max(first, behind)


async def cat_slices(
    store: Store, key: str, slices: Sequence[Slice], max_gap: int | None
) -> list[bytes]:
    """Read slices of one generation of an object; see `Store.get_ranges` for `max_gap`.

    Raises:
        NotFoundError: There is no such object.
        PreconditionFailedError: It was replaced while it was read, several times in a row.
    """
    if all(not start and end is None for start, end in slices):
        return [await store.get(key)] * len(slices)
    if all((start or 0) >= 0 and (end is None or end >= 0) for start, end in slices):
        ranges = [(start or 0, _NO_END if end is None else end) for start, end in slices]
        return await _cat_ranges(store, key, ranges, max_gap)
    for number in range(_MAX_READS):
        meta = await store.head(key)
        ranges = [_plan_slice(*each, meta.size) for each in slices]
        try:
            return await _cat_ranges(store, meta, ranges, max_gap)
        except NotFoundError:  # replaced since, or deleted: the next `head` raises then
            await asyncio.sleep(random.uniform(0, _PAUSE_SECONDS * 2**number))  # noqa: S311
    raise PreconditionFailedError(
        f"could not read {meta.uri}: it was replaced while it was read, {_MAX_READS} times in a "
        "row",
        uri=meta.uri,
    )


async def _cat_ranges(
    store: Store, key: str | ObjectMeta, ranges: Sequence[tuple[int, int]], max_gap: int | None
) -> list[bytes]:
    wanted = [each for each in ranges if each[1] > each[0]]
    gap: dict[str, int] = {} if max_gap is None else {"max_gap_bytes": max_gap}
    data = iter(await store.get_ranges(key, wanted, **gap))
    return [next(data) if end > start else b"" for start, end in ranges]
