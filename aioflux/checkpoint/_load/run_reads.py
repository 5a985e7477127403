"""The reads of a load on the event loop, bounded in number and bytes, yielded as they finish.

Data objects are read in the generations that the commit names, and verified by its checksums.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._load.copies import FramesCopy
from aioflux.checkpoint._load.plan import MAX_READ_BYTES
from aioflux.checkpoint._store.commits import MAX_IN_FLIGHT, uri_below
from aioflux.checkpoint._store.objects import meta_of, read_range
from aioflux.errors import CheckpointCorruptError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.codec import Codec
    from aioflux.checkpoint._load.copies import RangeCopy
    from aioflux.checkpoint._load.plan import PlannedRead
    from aioflux.checkpoint._load.stored_checkpoint import StoredCheckpoint
    from aioflux.options import TransferOptions
    from aioflux.store import Store

__all__ = ["DataObjects", "ObjectRead", "ReadPiece", "run_reads"]

_REUSED_BYTES: Final = 1024 * 1024
"""Buffers from this size on are used again: fresh memory costs ten times a copy."""

_MAX_DECODED: Final = 4
"""Reads that are decoded, besides those under way: the network does not wait for them."""


class DataObjects:
    """The data objects that a load reads; `is_verified`: with the checksums of the commit."""

    def __init__(self, store: Store, checkpoint: StoredCheckpoint, *, is_verified: bool) -> None:
        self.checkpoint = checkpoint
        self._store = store
        self._is_verified = is_verified
        self._metas: dict[str, ObjectMeta] = {}

    @property
    def transfer(self) -> TransferOptions:
        """Limits of the store."""
        return self._store.transfer

    async def find(self, keys: Sequence[str]) -> None:
        """Look up objects before they are read; those of stock DCP cost a request each.

        Raises:
            CheckpointCorruptError: One is missing.
        """
        metas = await gather_bounded(self._find_meta, keys, max_in_flight=MAX_IN_FLIGHT)
        self._metas = dict(zip(keys, metas, strict=True))

    async def _find_meta(self, key: str) -> ObjectMeta:
        stored = self.checkpoint.objects.get(key)
        if stored is not None:
            return meta_of(self._store, stored, is_pinned=self.checkpoint.is_pinned)
        try:
            return await self._store.head(key)
        except NotFoundError as exc:
            raise _missing(uri_below(self._store, key)) from exc

    def uri_of(self, key: str) -> str:
        """Return the whole uri of an object."""
        return self._metas[key].uri

    def size_of(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return self._metas[key].size

    def block_size_of(self, key: str) -> int:
        """Return the bytes in each block of an object that is verified alone; 1 without blocks."""
        stored = self.checkpoint.objects.get(key)
        return stored.block_size if stored is not None and self._is_verified else 1

    async def read(self, key: str, start: int, into: memoryview) -> None:
        """Read bytes of an object, verified as far as the commit allows.

        Raises:
            CheckpointCorruptError: The bytes are not those that were saved.
        """
        meta, stored = self._metas[key], self.checkpoint.objects.get(key)
        if stored is not None and self._is_verified:
            pinned = self.checkpoint.is_pinned
            await read_range(self._store, stored, start=start, into=into, is_pinned=pinned)
            return
        try:
            pin = meta if meta.generation else key
            num_read = await self._store.get_into(pin, into, start=start)
        except (NotFoundError, PreconditionFailedError) as exc:
            raise _missing(meta.uri) from exc
        if num_read < into.nbytes:
            raise CheckpointCorruptError(
                f"{meta.uri} is truncated: it ends at byte {start + num_read}; load an earlier "
                "checkpoint"
            )


def _missing(uri: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{uri} is missing, or was replaced since the load began; load an earlier checkpoint"
    )


class ObjectRead(NamedTuple):
    """One read of an object, and the copies of its parts."""

    key: str
    read: PlannedRead
    copies: tuple[tuple[int, RangeCopy], ...]
    """Of each part of the read: index of its target, and its copy."""

    @property
    def num_bytes(self) -> int:
        """Bytes of buffers that it needs."""
        if self.read.is_direct:
            return 0
        decoded = sum(copy.num_bytes for _, copy in self.copies if isinstance(copy, FramesCopy))
        return self.read.end - self.read.start + decoded


class ReadPiece(NamedTuple):
    """Bytes that were read for one copy."""

    target_index: int
    copy: RangeCopy
    start: int
    """First of them in the object."""
    data: torch.Tensor | None
    """The bytes, valid until the next pieces are asked for; None if they are in the target."""


class _FinishedRead(NamedTuple):
    pieces: list[ReadPiece]
    buffers: list[torch.Tensor]


class _BufferPool:
    """Memory for bytes that are not read into their target."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []

    def acquire(self, size: int) -> torch.Tensor:
        """Return a buffer of this size, or of `MAX_READ_BYTES` for all that are used again."""
        if not _REUSED_BYTES <= size <= MAX_READ_BYTES:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if self._idle:
            return self._idle.pop()
        return torch.empty(MAX_READ_BYTES, dtype=torch.uint8, device="cpu")

    def release(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for another read."""
        if buffer.numel() == MAX_READ_BYTES:
            self._idle.append(buffer)


async def run_reads(
    objects: DataObjects, reads: Iterable[ObjectRead], codec: Codec | None
) -> AsyncGenerator[list[ReadPiece], None]:
    """Yield the pieces of all reads, several at a time, in the order in which they arrive.

    At most `max_in_flight` reads are under way, with `max_in_flight_bytes` of buffers, including
    those of the pieces that were yielded last. The first failure cancels the reads under way.
    """
    transfer = objects.transfer
    buffers = _BufferPool()
    slots = asyncio.Semaphore(transfer.max_in_flight)
    most = transfer.max_in_flight + (_MAX_DECODED if codec else 0)
    waiting = iter(reads)
    following = next(waiting, None)
    running: dict[asyncio.Task[_FinishedRead], int] = {}
    num_bytes = 0
    try:
        while following is not None or running:
            while (
                following is not None
                and len(running) < most
                and (
                    not num_bytes or num_bytes + following.num_bytes <= transfer.max_in_flight_bytes
                )
            ):
                task = asyncio.create_task(_run(objects, following, codec, buffers, slots))
                running[task] = following.num_bytes
                num_bytes += following.num_bytes
                following = next(waiting, None)
            finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            results = [task.result() for task in finished]
            yield [piece for result in results for piece in result.pieces]
            num_bytes -= sum(running.pop(task) for task in finished)
            for result in results:
                for buffer in result.buffers:
                    buffers.release(buffer)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(
    objects: DataObjects,
    object_read: ObjectRead,
    codec: Codec | None,
    buffers: _BufferPool,
    slots: asyncio.Semaphore,
) -> _FinishedRead:
    key, read, copies = object_read
    if read.is_direct:
        ((index, copy),) = copies
        memory = copy.memory(read.start, read.end)
        assert memory is not None
        async with slots:
            await objects.read(key, read.start, memory)
        return _FinishedRead([ReadPiece(index, copy, read.start, None)], [])
    size = read.end - read.start
    used = [buffers.acquire(size)]
    buffer = used[0][:size]
    async with slots:
        await objects.read(key, read.start, buffer.numpy().data)
    pieces: list[ReadPiece] = []
    for (index, copy), part in zip(copies, read.parts, strict=True):
        data: torch.Tensor | None = buffer[part.start - read.start : part.end - read.start]
        if isinstance(copy, FramesCopy):
            assert codec is not None
            assert data is not None
            try:
                data = await _decode(copy, data, codec, buffers, used)
            except CheckpointCorruptError as exc:
                raise CheckpointCorruptError(f"{objects.uri_of(key)} is damaged: {exc}") from exc
        pieces.append(ReadPiece(index, copy, part.start, data))
    return _FinishedRead(pieces, used)


async def _decode(
    copy: FramesCopy,
    stored: torch.Tensor,
    codec: Codec,
    buffers: _BufferPool,
    used: list[torch.Tensor],
) -> torch.Tensor | None:
    """Decode frames into the target's memory, or into a buffer, which is returned."""
    decoded, out = None, copy.decoded_memory()
    if out is None:
        used.append(buffers.acquire(copy.num_bytes))
        decoded = used[-1][: copy.num_bytes]
        out = decoded.numpy().data
    await codec.decode(stored.numpy().data, copy.slices, out, plane_size=copy.plane_size)
    return decoded
