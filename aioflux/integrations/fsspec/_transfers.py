"""Transfers of whole objects: to and from local files, and from one store to another.

Files go up and come down in blocks, a few large ones at a time.
"""

from __future__ import annotations

import asyncio
import os
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store, WriteMode

__all__ = ["Callback", "LargeTransferSlots", "copy_object", "download", "upload"]

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
        """Report that so many more bytes have moved."""


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
