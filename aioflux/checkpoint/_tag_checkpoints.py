"""Checkpoint functions for the integrations of DeepSpeed, Lightning and Nebula.

Checkpoints of named parts under a tag:

    save: pickle_state -> write_part for each part -> TagSave commits the parts of all ranks
    load: read_tag -> read_part for each part

    root/<tag>/.metadata                        the commit object, which makes the tag exist
    root/<tag>/<save_id>/part-<name>            a part, in the format of torch.save

One object in the format of torch.save: save_by_torch writes it, read_into_memory reads it.

Names that need torch are imported on first use, because the node daemon of Nebula has no torch.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    SaveFacts,
    StoredItem,
    StoredObject,
    is_save_id,
    new_save_id,
    part_key,
    part_name,
    quote_name,
    step_of,
)
from aioflux.checkpoint._format.dcp_metadata import pickle_metadata_of_parts
from aioflux.checkpoint._save.job import GlobalSavePlan, Job, UploadSettings
from aioflux.checkpoint._save.save import Save
from aioflux.checkpoint._store.history import HistoryWriter
from aioflux.checkpoint._store.objects import MemoryFile, read_into_memory, write_object
from aioflux.checkpoint._store.tags import (
    StoredTag,
    is_valid,
    keep_newest,
    list_tags,
    read_part,
    read_tag,
    remove_tag,
)

if TYPE_CHECKING:
    from aioflux.checkpoint._save.ranks import Ranks, open_ranks
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.checkpoint._save.tensor_memory import pickle_state, save_by_torch
    from aioflux.store import Store

__all__ = [
    "COMMIT_KEY",
    "Arena",
    "HistoryWriter",
    "Job",
    "MemoryFile",
    "PartData",
    "Ranks",
    "StoredObject",
    "StoredTag",
    "TagSave",
    "UploadSettings",
    "is_save_id",
    "is_valid",
    "keep_newest",
    "list_tags",
    "new_save_id",
    "open_ranks",
    "pickle_state",
    "quote_name",
    "read_into_memory",
    "read_part",
    "read_tag",
    "remove_tag",
    "save_by_torch",
    "tag_job",
    "write_part",
]

_WITH_TORCH = {
    "Arena": "staging",
    "Ranks": "ranks",
    "open_ranks": "ranks",
    "pickle_state": "tensor_memory",
    "save_by_torch": "tensor_memory",
}
"""Names that need torch, each with its module in `checkpoint/_save`."""

_MAX_PARTS: Final = 4
"""Maximum number of parts that a rank writes at the same time. Each part is itself uploaded in
parallel."""


@dataclass(frozen=True, slots=True)
class PartData:
    """One part in memory."""

    name: str
    """Name of the part, unique under its tag."""
    pieces: Sequence[memoryview]
    """The bytes of the part, in order."""

    @property
    def num_bytes(self) -> int:
        """Size of the part in bytes."""
        return sum(piece.nbytes for piece in self.pieces)


def tag_job(
    tag: str, save_id: str, *, rank: int, world_size: int, started: float, staged_seconds: float
) -> Job:
    """Return the job of a save under a tag."""
    return Job(
        facts=SaveFacts(step=step_of(tag), save_id=save_id, world_size=world_size),
        rank=rank,
        global_plan=GlobalSavePlan(b"", (), {"tag": tag}) if rank == 0 else None,
        started=started,
        staged_seconds=staged_seconds,
        prefix=f"{quote_name(tag)}/",
    )


async def write_part(store: Store, job: Job, part: PartData) -> StoredObject:
    """Write one part; a load sees it only after the commit.

    Raises:
        StorageError: The part could not be written.
    """
    key = part_key(job.save_id, quote_name(part.name))
    stored = await write_object(
        store, job.prefix + key, part.pieces, rank=job.rank, size_hint=part.num_bytes
    )
    return replace(stored, key=key, items=(StoredItem(0, stored.size),))


class TagSave(Save):
    """One save of one rank under a tag.

    A part is either in memory, or stored already by `write_part`.
    """

    def __init__(
        self,
        store: Store,
        settings: UploadSettings,
        job: Job,
        parts: Sequence[PartData | StoredObject],
    ) -> None:
        super().__init__(store, settings, job, memoryview(b""), lambda _: None)
        self._parts = parts
        self.num_files = len(parts)
        """Number of parts of this rank; after the commit, on the coordinator, of all ranks."""
        self.checksums: dict[str, int] = {}
        """The crc32c of each part of this rank, by name; empty before the upload."""

    async def _upload(self) -> tuple[StoredObject, ...]:
        started = time.monotonic()
        stored = await gather_bounded(self._write_part, self._parts, max_in_flight=_MAX_PARTS)
        self._num_bytes = sum(each.size for each in stored)
        self._upload_seconds = time.monotonic() - started
        self.checksums = {part_name(each.key): each.crc32c for each in stored}
        return tuple(stored)

    async def _write_part(self, part: PartData | StoredObject) -> StoredObject:
        if isinstance(part, StoredObject):
            return part
        return await write_part(self._store, self._job, part)

    def _own_keys(self) -> list[str]:
        keys = [
            part.key
            if isinstance(part, StoredObject)
            else part_key(self._job.save_id, quote_name(part.name))
            for part in self._parts
        ]
        return [self._prefix + key for key in keys]

    def _encode_metadata(self, uploaded: Sequence[tuple[StoredObject, ...]]) -> bytes:
        parts = [stored for objects in uploaded for stored in objects]
        self.num_files = len(parts)
        return pickle_metadata_of_parts(
            (part_name(each.key), each.key, each.size) for each in parts
        )


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"aioflux.checkpoint._save.{_WITH_TORCH[name]}")
    return getattr(module, name)
