"""StorageTier: saves versions from memory to the local disk or the persistent storage.

memory tier -> next_version -> TagSave: parts, commit -> a line in checkpointHistories.csv
"""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from aioflux.checkpoint._tag_checkpoints import (
    PartData,
    TagSave,
    UploadSettings,
    keep_newest,
    remove_tag,
    tag_job,
)
from aioflux.errors import AiofluxError, AlreadyExistsError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.compat.nebula._memory_tier import MemoryTier, Version
    from aioflux.store import Store

__all__ = ["DISK", "STORAGE", "StorageTier"]

_log = logging.getLogger("aioflux")

DISK: Final = "disk"
STORAGE: Final = "storage"

_HISTORY_KEY: Final = "nebula/checkpointHistories.csv"
"""Key of the history, below the root of the checkpoints."""

_COLUMNS: Final = (
    *("time", "tag", "outcome", "num_files", "size_bytes", "blocked_seconds", "duration_seconds"),
    *("num_nodes", "save_id", "error", "throughput_bytes_per_second"),
)
"""Its columns in order; new ones are appended. A size is what was stored, a duration that from
memory to the commit or the failure."""

_MAX_ATTEMPTS: Final = 8


@dataclass(slots=True)
class StorageTier:
    """One store to which versions are saved, and when."""

    name: str
    """`disk` or `storage`."""
    store: Store
    """The root of the checkpoints."""
    interval_seconds: float
    """Least time between the start of two saves."""
    keep: int = 0
    """Tags to keep there; 0 for all."""
    started: float | None = None
    """Time at which the last save started, by the monotonic clock."""
    retry_at: float = math.inf
    """Time at which a failed save is retried."""
    store_in_use: Store | None = None
    """Store of the save in progress."""
    removed: set[str] = field(default_factory=set)
    """Tags to remove after the next save."""

    def is_time(self, now: float, *, is_ending: bool) -> bool:
        """Return whether the interval is over; at the end of the training it always is."""
        if self.started is None or is_ending:
            return True
        return now - self.started >= self.interval_seconds

    def next_version(
        self, memory: MemoryTier, now: float, *, has_trainers: bool, is_stopping: bool
    ) -> Version | None:
        """Return the version to save next; None if there is none yet."""
        waiting = [
            version
            for version in memory.versions
            if self.name not in version.saved_in and self.name not in version.failures
        ]
        for version in waiting:
            if version.is_due:
                return version
        newest = memory.newest
        is_ending = is_stopping or not has_trainers
        if newest is None or newest not in waiting or not self.is_time(now, is_ending=is_ending):
            return None
        # Nodes save a common version together, when `commit` makes it due on all of them.
        return newest if newest.num_nodes == 1 or self.name == DISK or not has_trainers else None

    def version_to_retry(
        self,
        memory: MemoryTier,
        now: float,
        *,
        alone_seconds: float,
        linger_seconds: float,
        is_stopping: bool,
    ) -> Version | None:
        """Return the newest version if saving it failed and it is time to retry.

        `alone_seconds` is the time since the last trainer disconnected, 0 while one is connected.
        """
        newest = memory.newest
        if newest is None or self.name not in newest.failures or now < self.retry_at:
            return None
        if is_stopping or alone_seconds >= linger_seconds:
            return None
        # All nodes of a common version would have to retry at once.
        return newest if newest.num_nodes == 1 or self.name == DISK else None

    async def save(
        self,
        store: Store,
        version: Version,
        views: Mapping[int, memoryview],
        *,
        memory: MemoryTier,
        commit_seconds: float,
    ) -> None:
        """Save a version to `store`, and remove older tags; `self.store` may be replaced meanwhile.

        `views` is the memory of its segments by number.
        """
        is_shared = self.name == STORAGE
        job = tag_job(
            version.tag,
            version.save_id,
            rank=version.rank if is_shared else 0,
            world_size=version.num_nodes if is_shared else 1,
            started=time.time(),
            staged_seconds=version.blocked_seconds,
        )
        parts = [
            PartData(part.name, [views[part.segment.number][: part.size]])
            for part in version.parts.values()
        ]
        save = _NebulaSave(store, UploadSettings(commit_seconds=commit_seconds), job, parts)
        save.tag = version.tag
        await save.run()
        for name, checksum in save.checksums.items():
            version.parts[name].crc32c = checksum
        if self.keep:
            await keep_newest(store, self.keep)
        if self.removed and version is memory.newest:
            removed, self.removed = self.removed, set()
            for tag in removed - {version.tag}:
                await remove_tag(store, tag)


class _NebulaSave(TagSave):
    """A save that is recorded in Nebula's history."""

    tag = ""

    async def _record(self, outcome: str, *, num_bytes: int = 0, error: str = "") -> None:
        job, now = self._job, time.time()
        seconds = now - job.started
        moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        row = (
            moment.replace("+00:00", "Z"),
            self.tag,
            outcome,
            self.num_files,
            num_bytes,
            job.staged_seconds,
            seconds,
            job.world_size,
            job.save_id,
            error,
            round(num_bytes / seconds) if seconds > 0 else 0,
        )
        try:
            await _append(self._store, row)
        except AiofluxError as exc:
            _log.warning("the history of %s lacks %s: %s", self._store.uri, self.tag, exc)


def _encode(row: tuple[object, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    return text.getvalue().encode(errors="backslashreplace")


async def _append(store: Store, row: tuple[object, ...]) -> None:
    """Append a line to the history; two or three requests.

    The object is replaced with a precondition on its generation, so that no line of a concurrent
    writer is lost. A line has about 150 bytes: 1.5 MB for 10,000 saves.
    """
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        condition: dict[str, Any]
        try:
            meta = await store.head(_HISTORY_KEY)
            data = await store.get(meta)
            condition = {"if_generation_match": meta.generation}
        except NotFoundError:
            data, condition = _encode(_COLUMNS), {"mode": "create"}
        try:
            await store.put(_HISTORY_KEY, data + _encode(row), content_type="text/csv", **condition)
        except (AlreadyExistsError, PreconditionFailedError):
            if attempt == _MAX_ATTEMPTS:
                raise
        else:
            return
