"""Transfers of objects: to and from local files, from one store to another, and reads of slices.

Files go up and come down in blocks, a few large ones at a time. Slices of one object are of one
generation.
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from aioflux.errors import NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store, WriteMode

__all__ = [
    "Callback",
    "LargeTransferSlots",
    "cat_slices",
    "copy_object",
    "download",
    "pair_slices",
    "upload",
]

_BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes that are read from a file, or written to one, at once."""

_MAX_LARGE = 4
"""Files of more than one block in transfer at once. Each has parts or ranges in parallel, for which
`TransferOptions.max_buffered_bytes` are held."""


class Callback(Protocol):
    """The methods of a `fsspec.callbacks.Callback` that are called."""

    def set_size(self, size: int) -> Any:
        """Report the size in bytes."""

    def relative_update(self, inc: int = 1) -> Any:
        """Report the number of bytes that were transferred since the last call."""


class LargeTransferSlots:
    """A bound on large transfers, one for each event loop."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        return self._by_loop.setdefault(loop, asyncio.Semaphore(_MAX_LARGE))


async def upload(
    store: Store,
    key: str,
    source: Path,
    *,
    mode: WriteMode,
    callback: Callback,
    slots: LargeTransferSlots,
) -> None:
    """Write a local file as an object: it appears whole or not at all."""
    file = await asyncio.to_thread(source.open, "rb", 0)
    try:
        size = os.fstat(file.fileno()).st_size
        callback.set_size(size)
        block = bytearray(min(size, _BLOCK_BYTES))
        if size <= _BLOCK_BYTES:
            num = await asyncio.to_thread(file.readinto, block)
            await store.put(key, memoryview(block)[:num], mode=mode)
            callback.relative_update(num)
            return
        async with slots.current(), store.open_writer(key, mode=mode) as writer:
            while num := await asyncio.to_thread(file.readinto, block):
                await writer.write(memoryview(block)[:num])
                callback.relative_update(num)
    finally:
        file.close()


async def download(
    store: Store,
    meta: ObjectMeta,
    target: Path | IO[bytes],
    *,
    callback: Callback,
    slots: LargeTransferSlots,
) -> None:
    """Write an object to a local file, which appears whole, or to one that is open."""
    callback.set_size(meta.size)
    if not isinstance(target, Path):
        await _fill(store, meta, target, callback, slots)
        return
    partial = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}")
    file = await asyncio.to_thread(partial.open, "xb", 0)
    try:
        with file:
            await _fill(store, meta, file, callback, slots)
        await asyncio.to_thread(partial.replace, target)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise


async def _fill(
    store: Store, meta: ObjectMeta, file: Any, callback: Callback, slots: LargeTransferSlots
) -> None:
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
    """Write all of a view: an unbuffered file may write less at once."""
    while view.nbytes:
        num = file.write(view)
        view = view[view.nbytes if num is None else num :]


async def copy_object(
    source: Store, meta: ObjectMeta, target: Store, key: str, *, slots: LargeTransferSlots
) -> None:
    """Copy an object into another store, through this process."""
    labels: dict[str, Any] = {"content_type": meta.content_type, "metadata": meta.metadata or None}
    if meta.size <= _BLOCK_BYTES:
        await target.put(key, await source.get(meta), **labels)
        return
    block = bytearray(_BLOCK_BYTES)
    async with (
        slots.current(),
        source.open_reader(meta) as reader,
        target.open_writer(key, **labels) as writer,
    ):
        while num := await reader.readinto(block):
            await writer.write(memoryview(block)[:num])


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
