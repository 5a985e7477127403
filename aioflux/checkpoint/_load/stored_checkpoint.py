"""Stored checkpoints: DCP's metadata, the commit, and the locations of items."""

from __future__ import annotations

from collections.abc import Mapping
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
from aioflux.checkpoint._store.steps import is_original, read_commit, uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

    from aioflux.checkpoint._format.commit import Commit, StoredItem, StoredObject
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store


class LocatedItem(NamedTuple):
    """The location of a stored item."""

    key: str
    """Name of the object, below the checkpoint's prefix."""
    offset: int
    length: int
    descriptors: tuple[str, ...]
    """Descriptors of DCP's extensions that transformed the item."""
    item: StoredItem | None
    """Description of the item in the commit; None in a checkpoint without a commit."""


class StoredShape(NamedTuple):
    """Sizes and dtype of a stored tensor, or of a part of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class StoredCheckpoint:
    """The content of one commit object."""

    uri: str
    metadata: Metadata
    commit: Commit | None
    """None in a checkpoint of stock DCP."""
    is_pinned: bool
    """Reads require the generations in the commit. False for a copy that another program made:
    its objects have other generations."""
    prefix: str = ""
    """Prefix of the checkpoint in its store, with a slash at the end."""

    @cached_property
    def objects(self) -> Mapping[str, StoredObject]:
        return {stored.key: stored for stored in (self.commit.objects if self.commit else ())}

    @cached_property
    def _items(self) -> Mapping[tuple[str, int], StoredItem]:
        objects = self.objects.items()
        return {(key, item.offset): item for key, stored in objects for item in stored.items}

    def locate(self, index: MetadataIndex) -> LocatedItem:
        """Return the location of an item.

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
            CheckpointCorruptError: The metadata has no such part.
        """
        tensor = self.metadata.state_dict_metadata.get(index.fqn)
        if isinstance(tensor, TensorStorageMetadata):
            part = _part(tensor.chunks, index)
            if part is not None:
                return StoredShape(tuple(part.sizes), tensor.properties.dtype)
        raise self.corrupt_error(f"it has no part of {index.fqn!r} at {index.offset}")

    def corrupt_error(self, reason: str) -> CheckpointCorruptError:
        text = f"{self.uri} is damaged: {reason}; load an earlier checkpoint"
        return CheckpointCorruptError(text)


def _part(parts: list[ChunkStorageMetadata], index: MetadataIndex) -> ChunkStorageMetadata | None:
    hint = index.index
    if hint is not None and hint < len(parts) and parts[hint].offsets == index.offset:
        return parts[hint]
    return next((part for part in parts if part.offsets == index.offset), None)


class CommitBytes(NamedTuple):
    """Key and bytes of a commit object, as the coordinator broadcasts them."""

    key: str
    """Name of the object, below the checkpoint's prefix."""
    data: bytes


async def read_commit_object(
    store: Store, rank: int | None = None, *, prefix: str = ""
) -> CommitBytes:
    """Read the commit object of the checkpoint below a prefix.

    With `rank`, read the commit object that this rank wrote in a save without collectives.

    Raises:
        CheckpointNotFoundError: There is no commit object.
        CheckpointCorruptError: The commit object is damaged.
        StorageError: The commit object cannot be read.
    """
    if rank is None:
        return commit_bytes(await read_commit(store, prefix), prefix)
    key = f"__{rank}{COMMIT_KEY}"
    try:
        return CommitBytes(key, await store.get(prefix + key))
    except NotFoundError as exc:
        raise CheckpointNotFoundError(
            f"there is no checkpoint {uri_below(store, prefix)}: it has neither a commit object "
            f"nor the object {key!r}, which rank {rank} writes in a save without collectives; "
            "list the checkpoints with `aioflux ckpt list`"
        ) from exc


def commit_bytes(found: CommitObject, prefix: str) -> CommitBytes:
    """Return key and bytes of the commit object of the checkpoint below a prefix."""
    return CommitBytes(found.meta.key.removeprefix(prefix), found.data)


def decode_checkpoint(store: Store, read: CommitBytes, *, prefix: str = "") -> StoredCheckpoint:
    """Decode the commit object of the checkpoint below a prefix.

    Raises:
        CheckpointCorruptError: The commit object is damaged, forged or truncated.
        CheckpointError: Neither aioflux nor DCP wrote the commit object.
    """
    uri = uri_below(store, prefix + read.key)
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
    is_pinned = commit is not None and is_original(store, prefix, commit)
    checkpoint_uri = uri_below(store, prefix).rstrip("/")
    return StoredCheckpoint(checkpoint_uri, metadata, commit, is_pinned, prefix)
