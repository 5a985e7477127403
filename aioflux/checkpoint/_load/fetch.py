"""fetch: parallel reads of all targets of one load.

    plan:             targets -> offset of each tensor's memory -> copies -> reads of each object
    event loop:       reads ranges, verifies and decodes them; bounded in number and bytes
    loading thread:   copies the bytes of finished reads to their targets

Most bytes that are contiguous in the target are read from the socket into the target's memory. All
other bytes are read into buffers, whose total size `TransferOptions.max_in_flight_bytes` limits
(see `run_reads`). Data objects are pinned to the generations in the commit, and verified by the
checksums in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from aioflux import _bridge
from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES
from aioflux.checkpoint._load.plan import MAX_READ_BYTES, plan_reads
from aioflux.checkpoint._load.targets import (
    FramesCopy,
    ItemCopy,
    TensorTarget,
    ValueTarget,
    copy_item,
    find_memory,
    plan_tensor_copies,
    untransform,
)
from aioflux.checkpoint._store.objects import meta_of, read_range
from aioflux.checkpoint._store.steps import MAX_IN_FLIGHT, uri_below
from aioflux.errors import CheckpointCorruptError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.codec import Codec
    from aioflux.checkpoint._load.plan import Part, Read
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem, StoredCheckpoint
    from aioflux.checkpoint._load.targets import RangeCopy
    from aioflux.options import TransferOptions
    from aioflux.store import Store

ObjectRead: TypeAlias = "tuple[str, Read[RangeCopy]]"
"""The key of an object and a read of it."""
Piece: TypeAlias = "tuple[Part[RangeCopy], torch.Tensor | None]"
"""A part of a read and its bytes, valid until the next pieces are requested; None if they are in
the target already."""

_SMALL_BYTES: Final = 64 * 1024
"""Items of stock DCP up to this size are read whole. For larger items, one more request finds the
offset of the tensor's memory, so that ranges of it can be read."""

_REUSED_BYTES: Final = 1024 * 1024
"""Larger buffers are reused: the first use of new memory costs ten times as much as a copy."""

_MAX_DECODING: Final = 4
"""Reads whose frames may be decoded while `max_in_flight` other reads use the network."""


def fetch(
    store: Store,
    checkpoint: StoredCheckpoint,
    targets: Sequence[TensorTarget | ValueTarget],
    *,
    registry: ExtensionRegistry,
    on_loaded: Callable[[int], None],
    is_verified: bool = True,
) -> None:
    """Load all targets from a store.

    `on_loaded` is called in this thread with the index of each target, once the target is complete.
    If `is_verified` is True, the bytes are compared with the checksums of the commit.

    Raises:
        CheckpointCorruptError: The stored bytes are damaged. Some targets may be loaded in part.
        StorageError: The stored bytes could not be read.
    """
    objects = DataObjects(store, checkpoint, is_verified=is_verified)
    _bridge.run(objects.look_up(sorted({target.stored.key for target in targets})))
    for target in targets:
        _check_bounds(objects, target.name, target.stored)
    starts = _find_memories(objects, targets)
    copies: dict[str, list[RangeCopy]] = {}
    for index, target in enumerate(targets):
        for copy in _plan_copies(objects, target, starts.get(index), registry):
            copy.index = index
            copies.setdefault(target.stored.key, []).append(copy)
    reads = _plan_object_reads(objects, copies)
    num_missing = Counter(part.copy.index for _, read in reads for part in read.parts)
    for index in range(len(targets)):
        if not num_missing[index]:  # a tensor without elements
            on_loaded(index)
    for index in _run(objects, reads):
        num_missing[index] -= 1
        if not num_missing[index]:
            on_loaded(index)


def _check_bounds(objects: DataObjects, name: str, stored: LocatedItem) -> None:
    size, end = objects.size_of(stored.key), stored.offset + stored.length
    if end > size:
        raise CheckpointCorruptError(
            f"{objects.uri_of(stored.key)} is truncated: it has {size} bytes, and the last byte of "
            f"{name!r} is byte {end - 1}; load an earlier checkpoint"
        )


def _find_memories(
    objects: DataObjects, targets: Sequence[TensorTarget | ValueTarget]
) -> dict[int, int]:
    """Return the offset of each tensor's memory in its object, if known, by index of the target."""
    starts: dict[int, int] = {}
    unknown: list[tuple[int, TensorTarget]] = []
    for index, target in enumerate(targets):
        if not isinstance(target, TensorTarget):
            continue
        if target.stored.item is not None:
            if start := _known_memory(objects.checkpoint, target):
                starts[index] = start
        elif target.stored.length > _SMALL_BYTES and not target.stored.descriptors:
            unknown.append((index, target))
    if unknown:
        _search_memories(objects, unknown, starts)
    return starts


def _known_memory(checkpoint: StoredCheckpoint, target: TensorTarget) -> int:
    """Return the offset of a tensor's memory in its object from the commit; 0 if unknown."""
    item = target.stored.item
    assert item is not None
    end = item.data_start + (item.frame_ends or (item.data_size,))[-1]
    is_within = item.offset <= item.data_start <= end <= item.offset + item.length
    if item.data_start and not (is_within and item.data_size == target.shape.num_bytes):
        raise checkpoint.corrupt_error(
            f"commit and metadata differ in the offset or size of {target.name!r}"
        )
    return item.data_start


def _search_memories(
    objects: DataObjects, unknown: Sequence[tuple[int, TensorTarget]], starts: dict[int, int]
) -> None:
    """Add to `starts` the offsets of tensors of stock DCP, read from the heads of their items."""

    def search(index: int, target: TensorTarget, head: torch.Tensor) -> None:
        start = find_memory(head, target, objects.uri_of(target.stored.key))
        if start is not None:
            starts[index] = target.stored.offset + start

    copies: dict[str, list[RangeCopy]] = {}
    for index, target in unknown:
        head = target.stored._replace(length=HEAD_SIZE_BYTES)
        copy = ItemCopy(head, partial(search, index, target))
        copies.setdefault(head.key, []).append(copy)
    for _ in _run(objects, _plan_object_reads(objects, copies)):
        pass


def _plan_copies(
    objects: DataObjects,
    target: TensorTarget | ValueTarget,
    start: int | None,
    registry: ExtensionRegistry,
) -> Iterator[RangeCopy]:
    """Yield the copies of a target. `start` is the offset of its memory; None if unknown."""
    stored, uri = target.stored, objects.uri_of(target.stored.key)
    if isinstance(target, ValueTarget):
        load = target.load
        if stored.descriptors:
            load = partial(_load_transformed, target, uri, registry)
        yield ItemCopy(stored, load)
    elif start is None:
        yield ItemCopy(stored, partial(copy_item, target=target, uri=uri, registry=registry))
    else:
        try:
            yield from plan_tensor_copies(target, start)
        except CheckpointCorruptError as exc:
            raise objects.checkpoint.corrupt_error(f"{target.name!r} in {uri}: {exc}") from exc


def _load_transformed(
    target: ValueTarget, uri: str, registry: ExtensionRegistry, data: torch.Tensor
) -> None:
    target.load(untransform(data, target.name, target.stored, uri, registry))


def _plan_object_reads(
    objects: DataObjects, copies: Mapping[str, Sequence[RangeCopy]]
) -> list[ObjectRead]:
    """Return the reads for the copies of each object."""
    return [
        (key, read)
        for key, group in copies.items()
        for read in plan_reads(
            group, size=objects.size_of(key), block_size=objects.block_size_of(key)
        )
    ]


def _run(objects: DataObjects, reads: Sequence[ObjectRead]) -> Iterator[int]:
    """Run reads and their copies. Yield, for each finished copy, the index of its target."""
    with ExitStack() as stack:
        codec = None
        if any(isinstance(part.copy, FramesCopy) for _, read in reads for part in read.parts):
            from aioflux.checkpoint._format.codec import Codec

            codec = stack.enter_context(Codec())
        for pieces in _bridge.iterate(run_reads(objects, reads, codec)):
            for part, data in pieces:
                if data is not None:
                    part.copy.finish(part.start, data)
                yield part.copy.index


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


def _buffer_bytes(read: Read[RangeCopy]) -> int:
    """Return the size of the buffers that a read needs, in bytes."""
    if read.is_direct:
        return 0
    copies = (part.copy for part in read.parts)
    decoded = sum(copy.num_bytes for copy in copies if isinstance(copy, FramesCopy))
    return read.end - read.start + decoded


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
) -> AsyncGenerator[list[Piece], None]:
    """Run reads in parallel, and yield the pieces of each read when it finishes.

    At most `TransferOptions.max_in_flight` requests are in flight. The buffers of the running reads
    and of the reads whose pieces were yielded last have at most `max_in_flight_bytes` together,
    unless one read alone exceeds it. Buffers may be larger (see `_BufferPool`). The first failure
    cancels all other reads.
    """
    transfer = objects.transfer
    buffers = _BufferPool()
    slots = asyncio.Semaphore(transfer.max_in_flight)
    max_running = transfer.max_in_flight + (_MAX_DECODING if codec else 0)
    waiting = ((key, read, _buffer_bytes(read)) for key, read in reads)
    following = next(waiting, None)
    running: dict[asyncio.Task[tuple[list[Piece], list[torch.Tensor]]], int] = {}
    num_bytes = 0
    try:
        while following is not None or running:
            while (
                following is not None
                and len(running) < max_running
                and (not num_bytes or num_bytes + following[2] <= transfer.max_in_flight_bytes)
            ):
                key, read, size = following
                task = asyncio.create_task(_run_read(objects, key, read, codec, buffers, slots))
                running[task] = size
                num_bytes += size
                following = next(waiting, None)
            finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            results = [task.result() for task in finished]
            yield [piece for pieces, _ in results for piece in pieces]
            num_bytes -= sum(running.pop(task) for task in finished)
            for _, used in results:
                for buffer in used:
                    buffers.release(buffer)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run_read(
    objects: DataObjects,
    key: str,
    read: Read[RangeCopy],
    codec: Codec | None,
    buffers: _BufferPool,
    slots: asyncio.Semaphore,
) -> tuple[list[Piece], list[torch.Tensor]]:
    """Run one read, and return its pieces and the buffers that they are in."""
    if read.is_direct:
        (part,) = read.parts
        memory = part.copy.memory(read.start, read.end)
        assert memory is not None
        async with slots:
            await objects.read(key, read.start, memory)
        return [(part, None)], []
    size = read.end - read.start
    used = [buffers.acquire(size)]
    buffer = used[0][:size]
    async with slots:
        await objects.read(key, read.start, buffer.numpy().data)
    pieces: list[Piece] = []
    for part in read.parts:
        data: torch.Tensor | None = buffer[part.start - read.start : part.end - read.start]
        if isinstance(part.copy, FramesCopy):
            assert codec is not None
            assert data is not None
            try:
                data = await _decode(part.copy, data, codec, buffers, used)
            except CheckpointCorruptError as exc:
                raise CheckpointCorruptError(f"{objects.uri_of(key)} is damaged: {exc}") from exc
        pieces.append((part, data))
    return pieces, used


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
