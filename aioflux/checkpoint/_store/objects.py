"""The data objects of a checkpoint: written without copies, read in verified ranges.

write: pieces in memory -> zero-copy writer -> compare the service's crc32c with the blocks'
read:  range, extended to whole blocks -> compare crc32c of each block -> caller's memory
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final

from aioflux._values.meta import ObjectMeta
from aioflux.checkpoint._format.commit import (
    BlockDigest,
    StoredObject,
    joined_blocks,
    plan_block_size,
    verify_blocks,
)
from aioflux.checkpoint._store.steps import uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
)
from aioflux.store import count_mismatch, read_hashed

if TYPE_CHECKING:
    from aioflux.store import Store

_SLICE_BYTES: Final = 16 * 1024 * 1024
"""Size of the pieces that are hashed between two awaits. Each piece blocks the event loop for
1-2 ms."""

_MAX_READS: Final = 3
"""Maximum number of reads of a range in which a block does not match: the transfer may have damaged
the bytes."""


async def write_object(
    store: Store,
    key: str,
    segments: Iterable[bytes | memoryview] | AsyncIterable[bytes | memoryview],
    *,
    rank: int = 0,
    size_hint: int = 0,
    progress: Callable[[int], None] | None = None,
) -> StoredObject:
    """Write one data object, and return its description for the commit, without items.

    Args:
        store: The store.
        key: Unique key of the object in the store.
        segments: The bytes of the object, in order. The memory is sent without a copy and must not
            change until this returns.
        rank: Rank that writes the object.
        size_hint: Approximate size of the object in bytes, which decides the size of its blocks.
        progress: Called after each write, with the number of bytes written.

    Raises:
        StorageError: The object could not be written; nothing is visible.
        ChecksumError: The service stored other bytes than were sent.
    """
    digest = BlockDigest(plan_block_size(size_hint))
    async with store.open_writer(key, zero_copy=True) as writer:
        async for view in _slices(segments):
            digest.update(view)
            await writer.write(view)
            if progress is not None:
                progress(view.nbytes)
    return stored_object(writer.meta, digest, key=key, size=digest.size, rank=rank)


def stored_object(
    meta: ObjectMeta, digest: BlockDigest, *, key: str, size: int, rank: int
) -> StoredObject:
    """Return the description of a written object for the commit, without items.

    Raises:
        ChecksumError: The object does not have this size, or the crc32c of `digest`.
    """
    whole, blocks = digest.finish()
    if meta.size != size or meta.crc32c not in {None, whole}:
        raise ChecksumError(
            f"could not write {meta.uri}: {size} bytes with crc32c {whole} were sent, but "
            f"the stored object has {meta.size} bytes and crc32c {meta.crc32c}; save again",
            uri=meta.uri,
        )
    return StoredObject(
        key=key,
        size=size,
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
    return (view[start : start + _SLICE_BYTES] for start in range(0, view.nbytes, _SLICE_BYTES))


def meta_of(
    store: Store, stored: StoredObject, *, key: str = "", is_pinned: bool = True
) -> ObjectMeta:
    """Return metadata to read a data object, with the generation in the commit if `is_pinned`."""
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
    """Read a range of a data object into memory, and verify it.

    A range of whole blocks is read straight into `into`. Any other range is extended to whole
    blocks, by up to two blocks, and copied.

    Args:
        store: The store.
        stored: Description of the object in the commit.
        start: Offset of the first byte in the object.
        into: Memory to fill.
        key: Key of the object in the store; `stored.key` by default.
        is_pinned: Read only the generation that the commit lists.

    Raises:
        CheckpointCorruptError: The object was deleted, replaced or truncated, or its bytes do not
            match the checksums of the commit.
    """
    end = start + into.nbytes
    if start == end:
        return
    block = stored.block_size
    meta = meta_of(store, stored, key=key, is_pinned=is_pinned)
    if start < 0 or end > stored.size:
        raise CheckpointCorruptError(
            f"cannot read bytes [{start}, {end}) of {meta.uri}: the commit lists this object with "
            f"{stored.size} bytes, so the commit contradicts itself; load an earlier checkpoint"
        )
    blocks_start, blocks_end = start - start % block, min(stored.size, -(-end // block) * block)
    if (blocks_start, blocks_end) == (start, end):
        await _read_blocks(store, stored, meta, start, into)
        return
    blocks = memoryview(bytearray(blocks_end - blocks_start))
    await _read_blocks(store, stored, meta, blocks_start, blocks)
    into[:] = blocks[start - blocks_start : end - blocks_start]


async def _read_blocks(
    store: Store, stored: StoredObject, meta: ObjectMeta, start: int, into: memoryview
) -> None:
    damaged_block = 0
    num_read = into.nbytes
    is_hashed = meta.generation and store.transfer.verify
    for number in range(_MAX_READS):
        if number:
            count_mismatch(store, meta, "they do not match the checksums of the commit")
        try:
            if is_hashed:
                checksum = await read_hashed(store, meta, into, start=start)
                if checksum == joined_blocks(stored, start, into.nbytes):
                    return
            else:
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
        mismatch = verify_blocks(stored, start, into)
        if mismatch is None:
            return
        damaged_block = mismatch
    first = damaged_block * stored.block_size
    last = min(first + stored.block_size, stored.size)
    raise CheckpointCorruptError(
        f"{meta.uri} is damaged: {_MAX_READS} reads returned bytes that are not those that were "
        f"saved, the last read in the block [{first}, {last}); load an earlier checkpoint"
    )
