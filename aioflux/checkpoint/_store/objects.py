"""The data objects of a checkpoint: written without copies, read in verified ranges.

segments -> borrowing writer -> service -> its crc32c is compared with that of all blocks
commit   -> ranges, widened to blocks -> crc32c of each -> caller's memory
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from aioflux._values.meta import ObjectMeta
from aioflux.checkpoint._format.block_checksums import BlockDigest, verify_blocks
from aioflux.checkpoint._format.commit import StoredObject, plan_block_size
from aioflux.checkpoint._store.commits import uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
)
from aioflux.options import TransferOptions
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
    from typing import Unpack

    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["meta_of", "open_checkpoint", "read_range", "write_object"]

_SLICE_BYTES: Final = 16 * 1024 * 1024
"""Bytes whose checksums are computed between two awaits: 1-2 ms."""

_MAX_READS: Final = 3
"""Reads of a block whose checksum does not match: it may be damaged in transit only."""


def open_checkpoint(uri: str, **options: Unpack[StoreOptions]) -> Store:
    """Open a checkpoint for reads that are verified by blocks only."""
    transfer = options.get("transfer") or TransferOptions()
    options["transfer"] = replace(transfer, verify_ranges="never")
    return open_store(uri, **options)


async def write_object(
    store: Store,
    key: str,
    segments: Iterable[bytes | memoryview] | AsyncIterable[bytes | memoryview],
    *,
    rank: int = 0,
    size_hint: int = 0,
    progress: Callable[[int], None] | None = None,
) -> StoredObject:
    """Write one data object, and return it as the service reports it, without its items.

    Args:
        store: The store.
        key: Name of the object in the store, used by no other.
        segments: Its bytes, in order. They must not change until this returns: they are not copied.
        rank: Rank that writes it.
        size_hint: Its approximate size in bytes, which decides the size of its blocks.
        progress: Called with the number of bytes of each piece that was written.

    Raises:
        StorageError: It could not be written; no object is visible.
        ChecksumError: The service stored other bytes than were sent.
    """
    digest = BlockDigest(plan_block_size(size_hint))
    async with store.open_writer(key, zero_copy=True) as writer:
        async for view in _slices(segments):
            digest.update(view)
            await writer.write(view)
            if progress is not None:
                progress(view.nbytes)
    whole, blocks = digest.finish()
    meta = writer.meta
    if meta.size != digest.size or meta.crc32c not in {None, whole}:
        raise ChecksumError(
            f"could not write {meta.uri}: it has {meta.size} bytes and crc32c {meta.crc32c}, "
            f"{digest.size} bytes with crc32c {whole} were sent; save again",
            uri=meta.uri,
        )
    return StoredObject(
        key=key,
        size=digest.size,
        crc32c=whole,
        generation=meta.generation,
        rank=rank,
        block_size=digest.block_size,
        block_crcs=blocks,
    )


async def _slices(
    segments: Iterable[bytes | memoryview] | AsyncIterable[bytes | memoryview],
) -> AsyncIterator[memoryview]:
    if not hasattr(segments, "__aiter__"):
        for piece in chain.from_iterable(map(_cut, segments)):
            yield piece
        return
    async for segment in segments:
        for piece in _cut(segment):
            yield piece


def _cut(segment: bytes | memoryview) -> Iterable[memoryview]:
    view = memoryview(segment).cast("B")
    return (view[at : at + _SLICE_BYTES] for at in range(0, view.nbytes, _SLICE_BYTES))


def meta_of(
    store: Store, stored: StoredObject, *, key: str = "", is_pinned: bool = True
) -> ObjectMeta:
    """Return the metadata of a data object, in the generation of the commit if `is_pinned`."""
    key = key or stored.key
    generation = stored.generation if is_pinned else ""
    return ObjectMeta(key=key, uri=uri_below(store, key), size=stored.size, generation=generation)


async def read_range(
    store: Store,
    stored: StoredObject,
    *,
    start: int,
    into: memoryview,
    key: str = "",
    is_pinned: bool = True,
) -> None:
    """Read bytes of a data object into memory, verified; straight into it if they are blocks.

    Another range is widened to blocks, and copied: up to two blocks more are read.

    Args:
        store: Opened by `open_checkpoint`; other stores would verify, and read, ranges twice.
        stored: The object in the commit.
        start: First byte.
        into: Memory to fill.
        key: Name of the object in the store; `stored.key` by default.
        is_pinned: Read only the generation in the commit.

    Raises:
        CheckpointCorruptError: The object is gone, was replaced or cut off, or its bytes are not
            those that were saved.
    """
    end = start + into.nbytes
    if start == end:
        return
    block = stored.block_size
    meta = meta_of(store, stored, key=key, is_pinned=is_pinned)
    if start < 0 or end > stored.size:
        raise CheckpointCorruptError(
            f"bytes {start} to {end} of {meta.uri} are not there, its size is {stored.size}: the "
            "commit contradicts itself"
        )
    first, last = start - start % block, min(stored.size, -(-end // block) * block)
    if (first, last) == (start, end):
        await _read_blocks(store, stored, meta, start, into)
        return
    blocks = memoryview(bytearray(last - first))
    await _read_blocks(store, stored, meta, first, blocks)
    into[:] = blocks[start - first : end - first]


async def _read_blocks(
    store: Store, stored: StoredObject, meta: ObjectMeta, start: int, into: memoryview
) -> None:
    wrong = 0
    for _ in range(_MAX_READS):
        try:
            num_read = await store.get_into(
                meta if meta.generation else meta.key, into, start=start
            )
        except ChecksumError as exc:
            raise CheckpointCorruptError(
                f"{meta.uri} is damaged: {exc}; load an earlier checkpoint"
            ) from exc
        except (NotFoundError, PreconditionFailedError) as exc:
            raise CheckpointCorruptError(
                f"{meta.uri} was deleted or replaced since it was saved (generation "
                f"{meta.generation or 'unknown'}); load an earlier checkpoint"
            ) from exc
        if num_read < into.nbytes:
            raise CheckpointCorruptError(
                f"{meta.uri} is truncated: it ends at byte {start + num_read} of {stored.size}; "
                "load an earlier checkpoint"
            )
        found = verify_blocks(stored, start, into)
        if found is None:
            return
        wrong = found
    at = wrong * stored.block_size
    raise CheckpointCorruptError(
        f"{meta.uri} is damaged: bytes [{at}, {min(at + stored.block_size, stored.size)}) are not "
        f"those that were saved, {_MAX_READS} reads agree; load an earlier checkpoint"
    )
