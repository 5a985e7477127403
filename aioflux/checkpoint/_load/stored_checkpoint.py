"""A stored checkpoint: its metadata, its commit, and the locations of its items."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
from aioflux.checkpoint._load.decode_metadata import decode_metadata
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

__all__ = [
    "CommitBytes",
    "LocatedItem",
    "StoredCheckpoint",
    "StoredShape",
    "decode_checkpoint",
    "read_commit_object",
]


class LocatedItem(NamedTuple):
    """A stored item, and its location."""

    key: str
    """Name of its object, below the checkpoint's prefix."""
    offset: int
    """First byte."""
    length: int
    """Bytes."""
    descriptors: tuple[str, ...]
    """Of the extensions of DCP that transformed it."""
    item: StoredItem | None
    """The item in the commit; None in a checkpoint without a commit."""


class StoredShape(NamedTuple):
    """Sizes and dtype of a stored tensor, or of a part of one."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint, as its commit object describes it."""

    uri: str
    """Uri of the checkpoint."""
    metadata: Metadata
    """DCP's metadata."""
    commit: Commit | None
    """The commit of aioflux; None in a checkpoint of stock DCP."""
    is_pinned: bool
    """It was not copied since, so that objects have the generations of the commit."""

    @cached_property
    def objects(self) -> Mapping[str, StoredObject]:
        """The objects of the commit, by key."""
        return {each.key: each for each in (self.commit.objects if self.commit else ())}

    @cached_property
    def _items(self) -> Mapping[tuple[str, int], StoredItem]:
        """The items of the commit, by key and offset."""
        objects = self.objects.items()
        return {(key, item.offset): item for key, each in objects for item in each.items}

    def locate(self, index: MetadataIndex) -> LocatedItem:
        """Return an item and its location.

        Raises:
            CheckpointCorruptError: The location is missing, or commit and metadata differ.
        """
        info = (self.metadata.storage_data or {}).get(index)
        if info is None:
            raise self.corrupt_error(f"the location of {index.fqn!r} is missing")
        item = None
        if self.commit is not None:
            obj = self.objects.get(info.relative_path)
            item = self._items.get((info.relative_path, info.offset))
            if obj is None or item is None or item.length != info.length:
                raise self.corrupt_error(
                    f"commit and metadata differ in the location of {index.fqn!r}"
                )
            if not 0 <= item.offset <= item.offset + item.length <= obj.size:
                raise self.corrupt_error(
                    f"{index.fqn!r} is beyond the end of {info.relative_path!r}"
                )
        descriptors = tuple(info.transform_descriptors or ())
        return LocatedItem(info.relative_path, info.offset, info.length, descriptors, item)

    def shape_of(self, index: MetadataIndex) -> StoredShape:
        """Return sizes and dtype of a stored part of a tensor.

        Raises:
            CheckpointCorruptError: There is none.
        """
        tensor = self.metadata.state_dict_metadata.get(index.fqn)
        if isinstance(tensor, TensorStorageMetadata):
            part = _part(tensor.chunks, index)
            if part is not None:
                return StoredShape(tuple(part.sizes), tensor.properties.dtype)
        raise self.corrupt_error(f"it holds no part of {index.fqn!r} at {index.offset}")

    def corrupt_error(self, what: str) -> CheckpointCorruptError:
        """Return the error of a damaged checkpoint."""
        return CheckpointCorruptError(f"{self.uri} is damaged: {what}; load an earlier checkpoint")


def _part(parts: list[ChunkStorageMetadata], index: MetadataIndex) -> ChunkStorageMetadata | None:
    at = index.index
    if at is not None and at < len(parts) and parts[at].offsets == index.offset:
        return parts[at]
    return next((each for each in parts if each.offsets == index.offset), None)


class CommitBytes(NamedTuple):
    """Key and bytes of a commit object, which ranks send to each other."""

    key: str
    """Below the checkpoint's prefix."""
    data: bytes


async def read_commit_object(store: Store, rank: int | None = None) -> CommitBytes:
    """Read the commit object of a checkpoint, or of one rank that saved without collectives.

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
            "its own; list the checkpoints with `aioflux ckpt list`"
        ) from exc


def decode_checkpoint(store: Store, read: CommitBytes) -> StoredCheckpoint:
    """Return the checkpoint of a commit object.

    Raises:
        CheckpointCorruptError: It is damaged, forged or truncated.
        CheckpointError: Neither aioflux nor DCP wrote it.
    """
    uri = uri_below(store, read.key)
    if read.key == INDEX_KEY:
        _, commit = decode_index(read.data, uri=uri)
        if commit is None:
            raise CheckpointError(
                f"{uri} is an index that aioflux did not write, without metadata of DCP; load its "
                "objects with the safetensors library"
            )
        pickled = unpack_metadata(commit, uri=uri)
    else:
        pickled, commit = decode_commit(read.data, uri=uri)
    # A rank that saved without collectives writes `__<rank>.metadata`.
    is_partial = read.key not in {COMMIT_KEY, INDEX_KEY}
    metadata = decode_metadata(pickled, uri=uri, is_partial=is_partial)
    storage = (metadata.storage_data or {}).values()
    if commit is None and any(find_save_id(info.relative_path) for info in storage):
        raise CheckpointCorruptError(
            f"{uri} is truncated: aioflux wrote it, and its commit is missing; load an earlier "
            "checkpoint"
        )
    is_pinned = commit is not None and is_home(store, "", commit)
    return StoredCheckpoint(store.uri.rstrip("/"), metadata, commit, is_pinned)
