"""Between local files and objects: whole files go up and come down in blocks, a few at a time."""

from __future__ import annotations

import asyncio
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import weakref

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store, WriteMode

__all__ = ["Callback", "Gates", "copy_across", "get_file", "put_file"]

_BLOCK_BYTES = 4 * 1024 * 1024
"""What is read of a file, or written to one, at once."""

_MAX_LARGE = 4
"""Files of more than one block that are under way at once. Each has parts or ranges in parallel,
for which `TransferOptions.max_buffered_bytes` are held."""


class Callback(Protocol):
    """What of a `fsspec.callbacks.Callback` is called."""

    def set_size(self, size: int) -> Any:
        """Tell how many bytes there are."""

    def relative_update(self, inc: int = 1) -> Any:
        """Tell that so many more have moved."""


Gates: TypeAlias = "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]"
"""One bound for each event loop."""


def _gate(gates: Gates) -> asyncio.Semaphore:
    return gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_LARGE))


async def put_file(
    store: Store, key: str, source: Path, *, mode: WriteMode, callback: Callback, gates: Gates
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
        async with _gate(gates), store.open_writer(key, mode=mode) as writer:
            while num := await asyncio.to_thread(file.readinto, block):
                await writer.write(memoryview(block)[:num])
                callback.relative_update(num)
    finally:
        file.close()


async def get_file(
    store: Store, meta: ObjectMeta, target: Path | IO[bytes], *, callback: Callback, gates: Gates
) -> None:
    """Write an object to a local file, which appears whole, or to one that is open."""
    callback.set_size(meta.size)
    if not isinstance(target, Path):
        await _fill(store, meta, target, callback, gates)
        return
    partial = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}")
    file = await asyncio.to_thread(partial.open, "xb", 0)
    try:
        with file:
            await _fill(store, meta, file, callback, gates)
        await asyncio.to_thread(partial.replace, target)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise


async def _fill(
    store: Store, meta: ObjectMeta, file: Any, callback: Callback, gates: Gates
) -> None:
    if meta.size <= _BLOCK_BYTES:
        data = await store.get(meta)
        await asyncio.to_thread(_write_all, file, memoryview(data))
        callback.relative_update(len(data))
        return
    block = bytearray(_BLOCK_BYTES)
    async with _gate(gates), store.open_reader(meta) as reader:
        while num := await reader.readinto(block):
            await asyncio.to_thread(_write_all, file, memoryview(block)[:num])
            callback.relative_update(num)


def _write_all(file: Any, view: memoryview) -> None:
    """Write all of it: an unbuffered file may take less at once."""
    while view.nbytes:
        num = file.write(view)
        view = view[view.nbytes if num is None else num :]


async def copy_across(
    source: Store, meta: ObjectMeta, target: Store, key: str, *, gates: Gates
) -> None:
    """Copy an object into another store, its bytes passing here."""
    labels: dict[str, Any] = {"content_type": meta.content_type, "metadata": meta.metadata or None}
    if meta.size <= _BLOCK_BYTES:
        await target.put(key, await source.get(meta), **labels)
        return
    block = bytearray(_BLOCK_BYTES)
    async with (
        _gate(gates),
        source.open_reader(meta) as reader,
        target.open_writer(key, **labels) as writer,
    ):
        while num := await reader.readinto(block):
            await writer.write(memoryview(block)[:num])
