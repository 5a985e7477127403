"""Parallel reads of a load on the event loop, bounded in number and bytes.

Data objects are pinned to the generations in the commit, and verified by the checksums in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._load.copies import FramesCopy
from aioflux.checkpoint._load.plan import MAX_READ_BYTES
from aioflux.checkpoint._store.objects import meta_of, read_range
from aioflux.checkpoint._store.steps import MAX_IN_FLIGHT, uri_below
from aioflux.errors import CheckpointCorruptError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.codec import Codec
    from aioflux.checkpoint._load.copies import RangeCopy
    from aioflux.checkpoint._load.plan import PlannedRead
    from aioflux.checkpoint._load.stored_checkpoint import StoredCheckpoint
    from aioflux.options import TransferOptions
    from aioflux.store import Store

_REUSED_BYTES: Final = 1024 * 1024
"""Larger buffers are reused: the first use of new memory costs ten times as much as a copy."""

_MAX_DECODING: Final = 4
"""Reads whose frames may be decoded while `max_in_flight` other reads use the network."""


class DataObjects:
    """The data objects of one load.

    If `is_verified` is True, bytes are compared with the checksums of the commit.
    """

    def __init__(self, store: Store, checkpoint: StoredCheckpoint, *, is_verified: bool) -> None:
        self.checkpoint = checkpoint
        self._store = store
        self._is_verified = is_verified
        self._metas: dict[str, ObjectMeta] = {}

    @property
    def transfer(self) -> TransferOptions:
        return self._store.transfer

    async def look_up(self, keys: Sequence[str]) -> None:
        """Look up the metadata of objects. Costs a request for each object of stock DCP.

        Raises:
            CheckpointCorruptError: An object is missing.
        """
        metas = await gather_bounded(self._find_meta, keys, max_in_flight=MAX_IN_FLIGHT)
        self._metas = dict(zip(keys, metas, strict=True))

    async def _find_meta(self, key: str) -> ObjectMeta:
        stored = self.checkpoint.objects.get(key)
        if stored is not None:
            pinned = self.checkpoint.is_pinned
            return meta_of(self._store, stored, key=self._full_key(key), is_pinned=pinned)
        try:
            return await self._store.head(self._full_key(key))
        except NotFoundError as exc:
            raise _missing_error(uri_below(self._store, self._full_key(key))) from exc

    def _full_key(self, key: str) -> str:
        return self.checkpoint.prefix + key

    def uri_of(self, key: str) -> str:
        return self._metas[key].uri

    def size_of(self, key: str) -> int:
        return self._metas[key].size

    def block_size_of(self, key: str) -> int:
        """Return the block size of an object in bytes; 1 if blocks are not verified."""
        stored = self.checkpoint.objects.get(key)
        return stored.block_size if stored is not None and self._is_verified else 1

    async def read(self, key: str, start: int, into: memoryview) -> None:
        """Read bytes of an object from `start` on, and verify them if the commit has checksums.

        Raises:
            CheckpointCorruptError: The object is damaged, missing or was replaced.
        """
        meta, stored = self._metas[key], self.checkpoint.objects.get(key)
        if stored is not None and self._is_verified:
            pinned = self.checkpoint.is_pinned
            await read_range(
                self._store, stored, start=start, into=into, key=meta.key, is_pinned=pinned
            )
            return
        try:
            pin = meta if meta.generation else meta.key
            num_read = await self._store.get_into(pin, into, start=start)
        except (NotFoundError, PreconditionFailedError) as exc:
            raise _missing_error(meta.uri) from exc
        if num_read < into.nbytes:
            raise CheckpointCorruptError(
                f"{meta.uri} is truncated: it has only {start + num_read} bytes; load an earlier "
                "checkpoint"
            )


def _missing_error(uri: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{uri} is missing, or was replaced since the load began; load an earlier checkpoint"
    )


class ObjectRead(NamedTuple):
    """One read of an object, and the copies of its parts."""

    key: str
    read: PlannedRead
    copies: tuple[tuple[int, RangeCopy], ...]
    """For each part of the read: index of the target, and the copy."""

    @property
    def num_bytes(self) -> int:
        """Size of the buffers that the read needs, in bytes."""
        if self.read.is_direct:
            return 0
        decoded = sum(copy.num_bytes for _, copy in self.copies if isinstance(copy, FramesCopy))
        return self.read.end - self.read.start + decoded


class ReadPiece(NamedTuple):
    """Bytes that were read for one copy."""

    target_index: int
    copy: RangeCopy
    start: int
    """Offset of the bytes in the object."""
    data: torch.Tensor | None
    """The bytes, valid until the next pieces are requested; None if they are in the target."""


class _FinishedRead(NamedTuple):
    pieces: list[ReadPiece]
    buffers: list[torch.Tensor]


class _BufferPool:
    """Buffers for bytes that are not read straight into a target."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []

    def acquire(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes. Reused buffers all have `MAX_READ_BYTES`."""
        if not _REUSED_BYTES <= size <= MAX_READ_BYTES:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if self._idle:
            return self._idle.pop()
        return torch.empty(MAX_READ_BYTES, dtype=torch.uint8, device="cpu")

    def release(self, buffer: torch.Tensor) -> None:
        """Make a buffer available to other reads, if it has the size of reused buffers."""
        if buffer.numel() == MAX_READ_BYTES:
            self._idle.append(buffer)


async def run_reads(
    objects: DataObjects, reads: Iterable[ObjectRead], codec: Codec | None
) -> AsyncGenerator[list[ReadPiece], None]:
    """Run reads in parallel, and yield the pieces of each read when it finishes.

    At most `TransferOptions.max_in_flight` requests are in flight. The sum of `num_bytes` over the
    running reads and the reads whose pieces were yielded last is at most `max_in_flight_bytes`,
    unless one read alone exceeds it. Buffers may be larger than `num_bytes` (see `_BufferPool`).
    The first failure cancels all other reads.
    """
    transfer = objects.transfer
    buffers = _BufferPool()
    slots = asyncio.Semaphore(transfer.max_in_flight)
    max_running = transfer.max_in_flight + (_MAX_DECODING if codec else 0)
    waiting = iter(reads)
    following = next(waiting, None)
    running: dict[asyncio.Task[_FinishedRead], int] = {}
    num_bytes = 0
    try:
        while following is not None or running:
            while (
                following is not None
                and len(running) < max_running
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
    """Decode frames into the target's memory and return None, or into a buffer and return it."""
    decoded, out = None, copy.decoded_memory()
    if out is None:
        used.append(buffers.acquire(copy.num_bytes))
        decoded = used[-1][: copy.num_bytes]
        out = decoded.numpy().data
    await codec.decode(stored.numpy().data, copy.slices, out, plane_size=copy.plane_size)
    return decoded
