"""From the memory of a node to a store: a version becomes a checkpoint at its tag, or stays unseen.

    root/<tag>/.metadata                        the commit object makes the tag exist
    root/<tag>/<save_id>/part-<name>            each part as torch.save wrote it
    root/nebula/checkpointHistories.csv         one line for each save

What nodes tell each other, and what is taken back when a save fails, is that of all checkpoints.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from aioflux._errors import AiofluxError
from aioflux.checkpoint._commit import StoredItem, StoredObject, part_key
from aioflux.checkpoint._objects import write_object
from aioflux.checkpoint._steps import each_bounded
from aioflux.checkpoint._uploader_job import Job, UploadSettings, Whole
from aioflux.checkpoint._uploader_work import Save
from aioflux.compat.nebula._histories import Line, append
from aioflux.compat.nebula._metadata import describe
from aioflux.compat.nebula._names import part_name, quote_name, step_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._history import Outcome
    from aioflux.checkpoint._uploader_job import SaveResult
    from aioflux.store import Store

__all__ = ["Staged", "TagSave", "save_tag"]

_log = logging.getLogger("aioflux")

_MAX_PARTS: Final = 4
"""Parts that are written at once; each is in many pieces by itself."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One part in memory."""

    name: str
    """Its name."""
    memory: memoryview
    """Its bytes."""


class TagSave(Save):
    """One save of one node under a tag."""

    def __init__(
        self, store: Store, settings: UploadSettings, job: Job, tag: str, parts: Sequence[Staged]
    ) -> None:
        super().__init__(store, settings, job, memoryview(b""), lambda _: None)
        self._tag = tag
        self._parts = parts
        self._num_files = len(parts)
        self._started = time.monotonic()
        self.checksums: dict[str, int] = {}
        """CRC32C of each part that was written."""

    async def _upload(self) -> tuple[StoredObject, ...]:
        self._started = time.monotonic()
        stored = await each_bounded(self._write_part, self._parts, max_in_flight=_MAX_PARTS)
        self._num_bytes = sum(each.size for each in stored)
        self._upload_seconds = time.monotonic() - self._started
        return tuple(stored)

    async def _write_part(self, part: Staged) -> StoredObject:
        key = part_key(self._job.save_id, quote_name(part.name))
        stored = await write_object(
            self._store,
            self._prefix + key,
            [part.memory],
            rank=self._job.rank,
            size_hint=part.memory.nbytes,
        )
        self.checksums[part.name] = stored.crc32c
        return replace(stored, key=key, items=(StoredItem(0, stored.size),))

    def _own_keys(self) -> list[str]:
        save_id = self._job.save_id
        return [self._prefix + part_key(save_id, quote_name(part.name)) for part in self._parts]

    def _describe(self, told: Sequence[tuple[StoredObject, ...]]) -> bytes:
        parts = [stored for objects in told for stored in objects]
        self._num_files = len(parts)
        return describe((part_name(each.key), each.key, each.size) for each in parts)

    async def _note(self, outcome: Outcome, *, num_bytes: int = 0, error: str = "") -> None:
        seconds = time.monotonic() - self._started
        line = Line(
            tag=self._tag,
            outcome=outcome,
            num_files=self._num_files,
            size_bytes=num_bytes,
            blocked_seconds=self._job.staged_seconds,
            duration_seconds=seconds,
            num_nodes=self._job.world_size,
            save_id=self._job.save_id,
            error=error,
        )
        try:
            await append(self._store, line)
        except AiofluxError as exc:
            _log.warning("the history of %s misses %s: %s", self._store.uri, self._tag, exc)


async def save_tag(
    store: Store,
    tag: str,
    parts: Sequence[Staged],
    *,
    save_id: str,
    begun: float,
    blocked_seconds: float,
    rank: int = 0,
    num_nodes: int = 1,
    commit_seconds: float = 600.0,
) -> tuple[SaveResult, dict[str, int]]:
    """Store what is in memory under a tag, and commit it with the other nodes.

    Args:
        store: The root of the checkpoints.
        tag: The tag.
        parts: The parts of this node.
        save_id: Names the save; the same on all nodes.
        begun: When it was complete in memory, in seconds since 1970.
        blocked_seconds: How long the training was held up.
        rank: Number of this node.
        num_nodes: How many nodes save it together.
        commit_seconds: How long one node waits for another.

    Returns:
        What was saved, and the crc32c of each part.

    Raises:
        AiofluxError: It is not committed, on no node.
    """
    job = Job(
        step=step_of(tag),
        save_id=save_id,
        rank=rank,
        world_size=num_nodes,
        arena=0,
        size=0,
        tail=(),
        items=(),
        element_sizes=(),
        whole=Whole(b"", (), {"tag": tag}) if rank == 0 else None,
        metrics={},
        begun=begun,
        staged_seconds=blocked_seconds,
        prefix=f"{quote_name(tag)}/",
    )
    save = TagSave(store, UploadSettings(commit_seconds=commit_seconds), job, tag, parts)
    return await save.run(), save.checksums
