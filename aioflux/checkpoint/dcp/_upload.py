"""Uploads of the items in a rank's plan, straight from the memory of the tensors.

    planner.resolve_data -> CPU, contiguous -> zip in pieces -> write_object, objects in parallel

Items are resolved in a thread, one batch of bounded size after another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import pickle
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from aioflux._concurrency.fan_out import gather
from aioflux.checkpoint._format.codec import EncodedItem, Packer
from aioflux.checkpoint._format.commit import encode_commit
from aioflux.checkpoint._save.items import (
    check_storable,
    encode_subclass,
    encode_tensor,
    find_ties,
    has_plain_memory,
)
from aioflux.checkpoint._store.objects import write_object
from aioflux.checkpoint.dcp._object_plan import item_bytes
from aioflux.errors import AiofluxError, CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from aioflux.checkpoint._format.codec import Codec
    from aioflux.checkpoint._format.commit import Commit, StoredObject
    from aioflux.store import Store

T = TypeVar("T")

PICKLE_PROTOCOL: Final = 4
"""Pickle protocol of the metadata: the newest that every Python supported by torch reads."""

_BATCH_BYTES: Final = 16 * 1024 * 1024
_BATCH_ITEMS: Final = 256
"""Largest batch that one call in a thread resolves. The call itself costs about 100 us."""

_SMALL_BYTES: Final = 64 * 1024
"""Pieces up to this size are joined: the copy costs less than one write for each piece."""

_ITEM_BYTES: Final = 2048
"""Approximate size of the zip around a tensor's memory."""


@dataclass(frozen=True)
class UploadedItem:
    """An item that a rank uploaded. It is the `storage_data` of a `WriteResult`."""

    info: _StorageInfo
    """Location of the item, for DCP's own readers."""
    save_id: str
    stored: StoredObject | None = None
    """The object of the item; None except for the first item of each object."""


def describe(error: BaseException) -> str:
    """Return class and message of an error, for messages of errors that must pickle."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor without lazy conjugation; copies only if necessary.

    A tensor of a subclass is only moved to the CPU.
    """
    tensor = tensor.detach()
    if not has_plain_memory(tensor):
        return tensor.cpu()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def resolve(planner: SavePlanner, item: WriteItem) -> memoryview | torch.Tensor:
    """Return the tensor of an item, or the bytes of a value that is not a tensor.

    Raises:
        CheckpointError: The planner cannot resolve the item, or returns another type.
    """
    name = item.index.fqn
    try:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor) and item.type != WriteItemType.BYTE_IO:
            check_storable(name, data)
            return _to_plain(data)
    except Exception as exc:
        raise CheckpointError(f"{name!r} of the state could not be read: {describe(exc)}") from exc
    if not isinstance(data, io.BytesIO) or item.type != WriteItemType.BYTE_IO:
        raise CheckpointError(
            f"{name!r} of the state is planned as {item.type.name}, and the planner returns "
            f"a {type(data).__name__}; resolve_data must return a tensor, or io.BytesIO for BYTE_IO"
        )
    return memoryview(data.getvalue())  # no copy; `getbuffer` would keep `data` from being closed


@dataclass(frozen=True, slots=True)
class RankUpload:
    """Arguments that all uploads of one rank in one save share."""

    store: Store
    planner: SavePlanner
    rank: int
    save_id: str
    codec: Codec | None = None
    """Compresses tensors; None stores them uncompressed."""
    descriptor: str = ""


async def _pieces(
    upload: RankUpload, packer: Packer, items: Sequence[WriteItem]
) -> AsyncGenerator[bytes | memoryview]:
    """Yield the bytes of one object. Items are resolved in batches."""
    for batch in batches(items):
        if upload.codec is None:
            for piece in await asyncio.to_thread(_pack, upload.planner, packer, batch):
                yield piece
            continue
        encoded = await asyncio.to_thread(_encode, upload.planner, batch)
        async with aclosing(packer.pack(encoded)) as pieces:
            async for piece in pieces:
                yield piece


def _pack(
    planner: SavePlanner, packer: Packer, items: Iterable[WriteItem]
) -> list[bytes | memoryview]:
    """Return the bytes of items, with neighbouring small pieces joined."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for encoded in _encode(planner, items):
        for piece in packer.add(encoded):
            if len(piece) <= _SMALL_BYTES:
                small.append(piece)
                continue
            pieces += (b"".join(small), piece)
            small = []
    return [*pieces, b"".join(small)]


def _encode(planner: SavePlanner, items: Iterable[WriteItem]) -> list[EncodedItem]:
    encoded = list[EncodedItem]()
    for item in items:
        data: Any = resolve(planner, item)
        if isinstance(data, torch.Tensor) and has_plain_memory(data):
            encoded.append(encode_tensor(data))
            continue
        if isinstance(data, torch.Tensor):
            data = memoryview(encode_subclass(item.index.fqn, data))
        encoded.append(EncodedItem((data,), data.nbytes))
    return encoded


def find_tied_items(planner: SavePlanner, items: Sequence[WriteItem]) -> dict[int, int]:
    """Find tied items: map the index of each later item to the index of the first.

    The result is empty for planners that override the stock methods, since they may create
    temporary tensors, and a later one may have the address of an earlier one.
    """
    kind, stock = type(planner), DefaultSavePlanner
    if not isinstance(planner, stock) or any(
        getattr(kind, name) is not getattr(stock, name)
        for name in ("resolve_data", "lookup_object", "transform_object")
    ):
        return {}
    indices = [index for index, item in enumerate(items) if item.type != WriteItemType.BYTE_IO]
    with torch.no_grad():
        tensors = [planner.lookup_object(items[index].index) for index in indices]
    return {indices[tied]: indices[first] for tied, first in find_ties(tensors).items()}


def tied_result(item: WriteItem, first: WriteResult) -> WriteResult:
    """Return the result of an item that is tied to the item with the result `first`."""
    uploaded = dataclasses.replace(first.storage_data, stored=None)
    return WriteResult(item.index, first.size_in_bytes, uploaded)


def batches(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield items in batches. One call in a thread resolves one batch."""
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


async def upload_items(
    upload: RankUpload, key: str, items: Sequence[WriteItem]
) -> list[WriteResult]:
    """Write one object in the layout of DCP, and return the results of the items."""
    packer = Packer(upload.codec)
    hint = sum(item_bytes(item) + _ITEM_BYTES for item in items)
    async with aclosing(_pieces(upload, packer, items)) as pieces:
        stored = await write_object(upload.store, key, pieces, rank=upload.rank, size_hint=hint)
    stored = msgspec.structs.replace(stored, items=tuple(packer.stored))
    descriptors = [upload.descriptor]
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=location.length,
            storage_data=UploadedItem(
                _StorageInfo(
                    key,
                    location.offset,
                    location.length,
                    descriptors if location.frame_size else None,
                ),
                upload.save_id,
                stored if number == 0 else None,
            ),
        )
        for number, (item, location) in enumerate(zip(items, packer.stored, strict=True))
    ]


async def upload_objects(
    upload: RankUpload,
    objects: Mapping[str, Callable[[], Awaitable[list[WriteResult]]]],
    *,
    cleanup_seconds: float,
) -> list[WriteResult]:
    """Write the objects of one rank in parallel. If a write fails, delete all of them.

    `objects` has a function for each key, which writes the object. The deletes may take
    `cleanup_seconds`.

    Raises:
        CheckpointError: An object could not be written; the error names rank and object.
    """
    try:
        written = await gather(_upload_object(upload, *entry) for entry in objects.items())
    except BaseException as exc:
        if note := await asyncio.shield(_delete(upload.store, objects, cleanup_seconds)):
            exc.add_note(note)
        raise
    return [result for results in written for result in results]


async def _upload_object(upload: RankUpload, key: str, write: Callable[[], Awaitable[T]]) -> T:
    try:
        return await write()
    except Exception as exc:
        raise CheckpointError(
            f"rank {upload.rank} could not save {upload.store.uri}{key}: {describe(exc)}"
        ) from exc


async def _delete(store: Store, keys: Iterable[str], seconds: float) -> str:
    """Delete the objects of a failed save. Return a note if some could not be deleted."""
    try:
        async with asyncio.timeout(seconds):
            errors = (await store.delete_many(keys)).errors
    except (AiofluxError, TimeoutError) as exc:
        return f"uploaded objects may remain ({describe(exc)}); `aioflux clean` deletes them"
    if errors:
        return f"{', '.join(errors)} could not be deleted; `aioflux clean` deletes them"
    return ""


def encode_dcp(
    metadata: Metadata, results: Sequence[WriteResult], commit: Commit
) -> tuple[bytes, Commit]:
    """Return the commit object in the layout of DCP, and the commit in it."""
    metadata.storage_data = {result.index: result.storage_data.info for result in results}
    stored = (result.storage_data.stored for result in results)
    commit = msgspec.structs.replace(commit, objects=tuple(filter(None, stored)))
    return encode_commit(pickle.dumps(metadata, protocol=PICKLE_PROTOCOL), commit), commit
