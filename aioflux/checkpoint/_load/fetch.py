"""fetch: parallel reads of all targets of one load.

    plan:             targets -> offset of each tensor's memory -> copies -> reads of each object
    event loop:       reads ranges, verifies and decodes them (`run_reads`)
    loading thread:   copies the bytes of finished reads to their targets

Most bytes that are contiguous in the target are read from the socket into the target's memory. All
other bytes are read into buffers, whose total size `TransferOptions.max_in_flight_bytes` limits
(see `run_reads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from aioflux import _bridge
from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES
from aioflux.checkpoint._load.copies import (
    FramesCopy,
    ItemCopy,
    TensorTarget,
    ValueTarget,
    plan_tensor_copies,
)
from aioflux.checkpoint._load.decode import copy_item, find_memory, untransform
from aioflux.checkpoint._load.plan import plan_reads
from aioflux.checkpoint._load.run_reads import DataObjects, ObjectRead, run_reads
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint._load.copies import RangeCopy
    from aioflux.checkpoint._load.stored_checkpoint import LocatedItem, StoredCheckpoint
    from aioflux.store import Store

_SMALL_BYTES: Final = 64 * 1024
"""Items of stock DCP up to this size are read whole. For larger items, one more request finds the
offset of the tensor's memory, so that ranges of it can be read."""


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
    copies = [
        (target.stored.key, index, copy)
        for index, target in enumerate(targets)
        for copy in _plan_copies(objects, target, starts.get(index), registry)
    ]
    reads = _plan_object_reads(objects, copies)
    num_missing = Counter(index for read in reads for index, _ in read.copies)
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

    copies = [
        (
            target.stored.key,
            index,
            ItemCopy(
                target.stored._replace(length=HEAD_SIZE_BYTES), partial(search, index, target)
            ),
        )
        for index, target in unknown
    ]
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
    objects: DataObjects, copies: Iterable[tuple[str, int, RangeCopy]]
) -> list[ObjectRead]:
    """Return the reads for all copies, given as (key, index of the target, copy)."""
    by_key: dict[str, list[tuple[int, RangeCopy]]] = {}
    for key, index, copy in copies:
        by_key.setdefault(key, []).append((index, copy))
    return [
        ObjectRead(key, read, tuple(group[part.range_index] for part in read.parts))
        for key, group in by_key.items()
        for read in plan_reads(
            [copy.needed for _, copy in group],
            size=objects.size_of(key),
            block_size=objects.block_size_of(key),
        )
    ]


def _run(objects: DataObjects, reads: Sequence[ObjectRead]) -> Iterator[int]:
    """Run reads and their copies. Yield, for each finished copy, the index of its target."""
    with ExitStack() as stack:
        codec = None
        if any(isinstance(copy, FramesCopy) for read in reads for _, copy in read.copies):
            from aioflux.checkpoint._format.codec import Codec

            codec = stack.enter_context(Codec())
        for pieces in _bridge.iterate(run_reads(objects, reads, codec)):
            for index, copy, start, data in pieces:
                if data is not None:
                    copy.finish(start, data)
                yield index
