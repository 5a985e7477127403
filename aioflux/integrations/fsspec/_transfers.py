"""Downloads to open files, copies between stores, and reads of slices of objects.

Objects are transferred in blocks, and only a few large ones at the same time. All slices of one
object are read from the same generation.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from aioflux._values.meta import portable_attributes
from aioflux.store import read_current

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

_BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes of one read or write."""

_MAX_LARGE = 4
"""Maximum number of objects above `_BLOCK_BYTES` in transfer at once. Each transfers parts or
ranges in parallel, and buffers up to `TransferOptions.max_buffered_bytes` for them."""


class Callback(Protocol):
    """The part of `fsspec.callbacks.Callback` that transfers use to report progress."""

    def set_size(self, size: int) -> Any:
        """Report the size of the transfer in bytes."""

    def relative_update(self, inc: int = 1) -> Any:
        """Report the number of bytes that were transferred since the last call."""


class LargeTransferSlots:
    """Limit on the number of large transfers at once, separate for each event loop."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        return self._by_loop.setdefault(loop, asyncio.Semaphore(_MAX_LARGE))


async def download_into(
    store: Store, meta: ObjectMeta, file: Any, *, callback: Callback, slots: LargeTransferSlots
) -> None:
    """Download an object to an open file."""
    callback.set_size(meta.size)
    if meta.size <= _BLOCK_BYTES:
        data = await store.get(meta)
        await asyncio.to_thread(_write_all, file, memoryview(data))
        callback.relative_update(len(data))
        return
    block = bytearray(_BLOCK_BYTES)
    async with slots.current(), store.open_reader(meta) as reader:
        while num := await reader.readinto(block):
            await asyncio.to_thread(_write_all, file, memoryview(block)[:num])
            callback.relative_update(num)


def _write_all(file: Any, view: memoryview) -> None:
    """Write all bytes of a view. One `write` of an unbuffered file may write only a part."""
    while view.nbytes:
        num = file.write(view)
        view = view[view.nbytes if num is None else num :]


async def copy_object(
    source: Store, meta: ObjectMeta, target: Store, key: str, *, slots: LargeTransferSlots
) -> None:
    """Copy an object to another store: this process downloads and uploads the bytes."""
    options = portable_attributes(meta)
    if meta.size <= _BLOCK_BYTES:
        await target.put(key, await source.get(meta), **options)
        return
    block = bytearray(_BLOCK_BYTES)
    async with (
        slots.current(),
        source.open_reader(meta) as reader,
        target.open_writer(key, **options) as writer,
    ):
        while num := await reader.readinto(block):
            await writer.write(memoryview(block)[:num])


Slice: TypeAlias = tuple[int | None, int | None]
"""Start and end as in Python's slices: a negative number counts from the end of the object."""

_NO_END: Final = 1 << 62
"""An end beyond the size of any object."""


def pair_slices(paths: Any, starts: Any, ends: Any) -> list[tuple[Any, Slice]]:
    """Return each path of a `cat_ranges` call with its slice."""
    if not isinstance(paths, list):
        raise TypeError(f"cat_ranges takes a list of paths, not {type(paths).__name__}")
    all_starts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
    all_ends = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
    if not len(paths) == len(all_starts) == len(all_ends):
        raise ValueError(
            "cat_ranges needs one start and one end for each path, not "
            f"{len(paths)} paths, {len(all_starts)} starts and {len(all_ends)} ends"
        )
    return list(zip(paths, zip(all_starts, all_ends, strict=True), strict=True))


def _plan_slice(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Return the range `[start, end)` that a slice selects in an object of `size` bytes."""
    range_start, range_end, _ = slice(start, end).indices(size)
    return range_start, max(range_start, range_end)


async def cat_slices(
    store: Store, key: str, slices: Sequence[Slice], max_gap: int | None
) -> list[bytes]:
    """Read slices of one generation of an object; see `Store.get_ranges` for `max_gap`.

    Raises:
        NotFoundError: The object does not exist.
        PreconditionFailedError: The object was replaced during every attempt to read it.
    """
    if all(not start and end is None for start, end in slices):
        return [await store.get(key)] * len(slices)
    if all((start or 0) >= 0 and (end is None or end >= 0) for start, end in slices):
        ranges = [(start or 0, _NO_END if end is None else end) for start, end in slices]
        return await _cat_ranges(store, key, ranges, max_gap)

    async def read(meta: ObjectMeta) -> list[bytes]:
        ranges = [_plan_slice(start, end, meta.size) for start, end in slices]
        return await _cat_ranges(store, meta, ranges, max_gap)

    return await read_current(store, key, read)


async def _cat_ranges(
    store: Store, key: str | ObjectMeta, ranges: Sequence[tuple[int, int]], max_gap: int | None
) -> list[bytes]:
    nonempty = [(start, end) for start, end in ranges if end > start]
    gap: dict[str, int] = {} if max_gap is None else {"max_gap_bytes": max_gap}
    data = iter(await store.get_ranges(key, nonempty, **gap))
    return [next(data) if end > start else b"" for start, end in ranges]
