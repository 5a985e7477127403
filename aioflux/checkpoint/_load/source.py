"""What a checkpoint is made of: its metadata, its commit, and where each item lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    INDEX_KEY,
    decode_commit,
    decode_index,
    find_save_id,
)
from aioflux.checkpoint._format.safetensors import unpack_metadata
from aioflux.checkpoint._load.dcp_metadata import decode_metadata
from aioflux.checkpoint._store.commits import is_home, read_commit, uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

    from aioflux.checkpoint._format.commit import Commit, StoredItem, StoredObject
    from aioflux.store import Store

__all__ = ["CommitBytes", "Shape", "Source", "Stored", "decode_source", "read_commit_object"]


class Stored(NamedTuple):
    """Where one item lies."""

    key: str
    """Name of its object, below the checkpoint's prefix."""
    offset: int
    """First byte."""
    length: int
    """Bytes."""
    descriptors: tuple[str, ...]
    """How stock DCP transformed it."""
    obj: StoredObject | None
    """What the commit says of the object; None in a checkpoint without a commit."""
    item: StoredItem | None
    """What the commit says of the item."""


class Shape(NamedTuple):
    """What a stored tensor, or a part of one, is like."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """One checkpoint, as its commit object tells of it."""

    uri: str
    """Uri of the checkpoint."""
    metadata: Metadata
    """DCP's metadata."""
    commit: Commit | None
    """Our commit; None where stock DCP wrote the checkpoint."""
    is_pinned: bool
    """It lies where it was saved, so that objects have the generations that the commit names."""
    objects: Mapping[str, StoredObject] = field(init=False, repr=False)
    """The objects of the commit, by key."""
    items: Mapping[tuple[str, int], StoredItem] = field(init=False, repr=False)
    """The items of the commit, by key and offset."""

    def __post_init__(self) -> None:
        objects = {each.key: each for each in (self.commit.objects if self.commit else ())}
        items = {(key, item.offset): item for key, each in objects.items() for item in each.items}
        object.__setattr__(self, "objects", objects)
        object.__setattr__(self, "items", items)

    def find(self, index: MetadataIndex) -> Stored:
        """Return where an item lies.

        Raises:
            CheckpointCorruptError: The checkpoint does not say, or contradicts itself.
        """
        info = (self.metadata.storage_data or {}).get(index)
        if info is None:
            raise self.corrupt(f"it does not say where {index.fqn!r} is stored")
        obj = item = None
        if self.commit is not None:
            obj = self.objects.get(info.relative_path)
            item = self.items.get((info.relative_path, info.offset))
            if obj is None or item is None or item.length != info.length:
                raise self.corrupt(f"commit and metadata differ in where {index.fqn!r} is stored")
            if not 0 <= item.offset <= item.offset + item.length <= obj.size:
                raise self.corrupt(f"{index.fqn!r} lies beyond the end of {info.relative_path!r}")
        descriptors = tuple(info.transform_descriptors or ())
        return Stored(info.relative_path, info.offset, info.length, descriptors, obj, item)

    def shape(self, index: MetadataIndex) -> Shape:
        """Return what the stored part of a tensor is like that has this index.

        Raises:
            CheckpointCorruptError: There is none.
        """
        tensor = self.metadata.state_dict_metadata.get(index.fqn)
        if isinstance(tensor, TensorStorageMetadata):
            part = _part(tensor.chunks, index)
            if part is not None:
                return Shape(tuple(part.sizes), tensor.properties.dtype)
        raise self.corrupt(f"it holds no part of {index.fqn!r} at {index.offset}")

    def corrupt(self, what: str) -> CheckpointCorruptError:
        """Return the error that says what is wrong with it."""
        return CheckpointCorruptError(f"{self.uri} is damaged: {what}; load an earlier checkpoint")


def _part(parts: list[ChunkStorageMetadata], index: MetadataIndex) -> ChunkStorageMetadata | None:
    at = index.index
    if at is not None and at < len(parts) and parts[at].offsets == index.offset:
        return parts[at]
    return next((each for each in parts if each.offsets == index.offset), None)


class CommitBytes(NamedTuple):
    """A commit object as it was read: what ranks tell each other."""

    key: str
    """Its name, below the checkpoint's prefix."""
    data: bytes
    """All of its bytes."""


async def read_commit_object(store: Store, rank: int | None = None) -> CommitBytes:
    """Read the commit object of a checkpoint, or of one rank's that saved for itself alone.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointCorruptError: It is damaged.
        StorageError: It cannot be read.
    """
    if rank is None:
        found = await read_commit(store, "")
        return CommitBytes(found.meta.key, found.data)
    key = f"__{rank}{COMMIT_KEY}"
    try:
        return CommitBytes(key, await store.get(key))
    except NotFoundError as exc:
        raise CheckpointNotFoundError(
            f"there is no checkpoint {store.uri}: it has no commit object, and rank {rank} none of "
            "its own; look at what there is with `aioflux ckpt list`"
        ) from exc


def decode_source(store: Store, read: CommitBytes) -> Source:
    """Return the checkpoint that has this commit object.

    Raises:
        CheckpointCorruptError: It is damaged, forged, or was cut off.
        CheckpointError: Something else than DCP wrote it.
    """
    uri = uri_below(store, read.key)
    if read.key == INDEX_KEY:
        _, commit = decode_index(read.data, uri=uri)
        if commit is None:
            raise CheckpointError(
                f"{uri} is an index that aioflux did not write, and names no shards of DCP; load "
                "its objects with the safetensors library"
            )
        pickled = unpack_metadata(commit, uri=uri)
    else:
        pickled, commit = decode_commit(read.data, uri=uri)
    # What one rank wrote of itself alone is called `__<rank>.metadata`.
    is_partial = read.key not in {COMMIT_KEY, INDEX_KEY}
    metadata = decode_metadata(pickled, uri=uri, is_partial=is_partial)
    storage = (metadata.storage_data or {}).values()
    if commit is None and any(find_save_id(info.relative_path) for info in storage):
        raise CheckpointCorruptError(
            f"{uri} was cut off: aioflux wrote it, and its commit is missing; load an earlier "
            "checkpoint"
        )
    is_pinned = commit is not None and is_home(store, "", commit)
    return Source(store.uri.rstrip("/"), metadata, commit, is_pinned)
