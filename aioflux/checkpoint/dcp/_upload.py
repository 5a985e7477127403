"""Items of a plan, to data objects: resolved in a thread, sent from where their memory lies.

    planner.resolve_data -> CPU, contiguous -> zip in pieces -> write_object, several at once

What is resolved ahead is bounded: a piece of it is asked for when the upload has room for it.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from aioflux._errors import AiofluxError, CheckpointError
from aioflux.checkpoint._commit import StoredItem, StoredObject
from aioflux.checkpoint._items import ALIGNMENT_BYTES, EncodedItem, encode_tensor, has_plain_memory
from aioflux.checkpoint._objects import write_object
from aioflux.checkpoint.dcp._plan_writes import item_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from aioflux.store import Store

__all__ = ["Written", "describe", "plain", "remove", "resolve", "upload_objects"]

_BATCH_BYTES: Final = 16 * 1024 * 1024
_BATCH_ITEMS: Final = 256
"""What is resolved in one turn of a thread, which costs about 100 us: this many bytes or items."""

_ITEM_BYTES: Final = 2048
"""About what a zip adds to a tensor."""

_CLEANUP_SECONDS: Final = 30.0
"""Time that a failed save has to delete what it uploaded."""


@dataclass(frozen=True)
class Written:
    """What one rank tells the coordinator of an item: the storage data of a `WriteResult`."""

    info: _StorageInfo
    """Where stock readers find it."""
    save_id: str
    """The save that it is part of."""
    stored: StoredObject | None = None
    """Its object, with the first item of each."""


def describe(error: BaseException) -> str:
    """Return an error's class and message: what is left of one that may not pickle."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as its elements lie in a file: on the CPU, contiguous, nothing pending.

    It is copied only where it is not so already.
    """
    tensor = tensor.detach()
    if not has_plain_memory(tensor):
        return tensor.cpu()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def resolve(planner: SavePlanner, item: WriteItem) -> memoryview | torch.Tensor:
    """Return what an item stands for; bytes for a value that is no tensor.

    Raises:
        CheckpointError: The planner cannot tell.
    """
    name = item.index.fqn
    try:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor) and item.type != WriteItemType.BYTE_IO:
            return plain(data)
    except Exception as exc:
        raise CheckpointError(f"{name!r} of the state could not be read: {describe(exc)}") from exc
    if not isinstance(data, io.BytesIO) or item.type != WriteItemType.BYTE_IO:
        raise CheckpointError(
            f"{name!r} of the state is planned as {item.type.name}, and the planner gives a "
            f"{type(data).__name__}; its resolve_data must give a tensor, or io.BytesIO for BYTE_IO"
        )
    return data.getbuffer()


class _Packing:
    """Encodes the items of one object, one behind the other, and notes where they lie."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._size = 0
        self.items: list[StoredItem] = []

    def pack(self, items: Iterable[WriteItem]) -> list[bytes | memoryview]:
        """Return the bytes of some items, with what aligns them."""
        pieces = list[bytes | memoryview]()
        for item in items:
            data = resolve(self._planner, item)
            if isinstance(data, torch.Tensor):
                encoded = encode_tensor(data)
            else:
                encoded = EncodedItem((data,) if data.nbytes else (), data.nbytes, 0, 0)
            if padding := -self._size % ALIGNMENT_BYTES:
                pieces.append(bytes(padding))
            pieces += encoded.segments
            start = self._size + padding
            self.items.append(
                StoredItem(
                    offset=start,
                    length=encoded.length,
                    data_start=start + encoded.data_start if encoded.data_start else 0,
                    data_size=encoded.data_size,
                )
            )
            self._size = start + encoded.length
        return pieces


def _batches(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += item_bytes(item)
        if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_ITEMS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


async def _pieces(
    items: Sequence[WriteItem], pack: Callable[[Iterable[WriteItem]], list[bytes | memoryview]]
) -> AsyncIterator[bytes | memoryview]:
    for batch in _batches(items):
        for piece in await asyncio.to_thread(pack, batch):
            yield piece


async def _upload_object(
    store: Store,
    key: str,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    *,
    rank: int,
    save_id: str,
) -> list[WriteResult]:
    """Write one object, and return what became of each of its items."""
    packing = _Packing(planner)
    hint = sum(item_bytes(item) + _ITEM_BYTES for item in items)
    try:
        stored = await write_object(
            store, key, _pieces(items, packing.pack), rank=rank, size_hint=hint
        )
    except Exception as exc:
        raise CheckpointError(
            f"rank {rank} could not save {store.uri}{key}: {describe(exc)}"
        ) from exc
    stored = msgspec.structs.replace(stored, items=tuple(packing.items))
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=at.length,
            storage_data=Written(
                _StorageInfo(key, at.offset, at.length), save_id, stored if number == 0 else None
            ),
        )
        for number, (item, at) in enumerate(zip(items, packing.items, strict=True))
    ]


async def upload_objects(
    store: Store,
    objects: Mapping[str, Sequence[WriteItem]],
    planner: SavePlanner,
    *,
    rank: int,
    save_id: str,
) -> list[WriteResult]:
    """Write the data objects of one rank, all at once: all of them, or none stays.

    Raises:
        CheckpointError: The first that could not be written, with rank and key.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _upload_object(store, key, items, planner, rank=rank, save_id=save_id)
                )
                for key, items in objects.items()
            ]
    except BaseException as exc:
        error = exc.exceptions[0] if isinstance(exc, BaseExceptionGroup) else exc
        if note := await asyncio.shield(remove(store, objects)):
            error.add_note(note)
        if error is exc:
            raise
        raise error from error.__cause__
    return [result for task in tasks for result in task.result()]


async def remove(store: Store, keys: Iterable[str]) -> str:
    """Delete what a failed save uploaded, and return what is to be said of what stays."""
    try:
        async with asyncio.timeout(_CLEANUP_SECONDS):
            errors = (await store.delete_many(keys)).errors
    except (AiofluxError, TimeoutError) as exc:
        return f"what was uploaded may still be there, `aioflux clean` finds it: {describe(exc)}"
    if errors:
        return f"{', '.join(errors)} could not be deleted; `aioflux clean` finds what stays"
    return ""
