"""Saves of versions (saves of a tag) from the memory tier to local disk or persistent storage.

memory tier -> next_version -> TagSave: parts, commit -> a line in checkpointHistories.csv
"""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from collections.abc import Mapping
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
    from aioflux.compat.nebula._memory_tier import MemoryTier, Version
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

DISK: Final = "disk"
STORAGE: Final = "storage"

_HISTORY_KEY: Final = "nebula/checkpointHistories.csv"
"""Key of Nebula's history, relative to the root of the checkpoints."""

_COLUMNS: Final = (
    *("time", "tag", "outcome", "num_files", "size_bytes", "blocked_seconds", "duration_seconds"),
    *("num_nodes", "save_id", "error", "throughput_bytes_per_second"),
)
"""Columns of the history in order; new columns are only appended. `size_bytes` is the stored size,
and `duration_seconds` the time from the start of the upload to the commit or failure."""

_MAX_ATTEMPTS: Final = 8


@dataclass(slots=True)
class StorageTier:
    """A store that versions are saved to, with the schedule of its saves."""

    name: str
    """DISK or STORAGE."""
    store: Store
    interval_seconds: float
    """Minimum time between the starts of two saves."""
    keep: int = 0
    """Number of tags to keep in the store; 0 for all."""
    started: float | None = None
    """Time at which the last save started, by the monotonic clock."""
    retry_at: float = math.inf
    """Time at which to retry a failed save, by the monotonic clock."""
    store_in_use: Store | None = None
    """Store of the save in progress; differs from `store` after `store` was replaced."""
    removed: set[str] = field(default_factory=set)
    """Tags to remove from the store after the next save."""

    def is_time(self, now: float, *, is_ending: bool) -> bool:
        """Return whether the interval has passed; True for the first save, or if `is_ending`."""
        if self.started is None or is_ending:
            return True
        return now - self.started >= self.interval_seconds

    def next_version(
        self, memory: MemoryTier, now: float, *, has_trainers: bool, is_stopping: bool
    ) -> Version | None:
        """Return the version to save now, or None."""
        unsaved = [
            version
            for version in memory.versions
            if self.name not in version.saved_in and self.name not in version.failures
        ]
        for version in unsaved:
            if version.must_save:
                return version
        newest = memory.newest
        is_ending = is_stopping or not has_trainers
        if newest is None or newest not in unsaved or not self.is_time(now, is_ending=is_ending):
            return None
        # A version of several nodes is not chosen here while trainers are connected: all nodes have
        # to save it at the same time, and `commit` sets its `must_save` on all of them.
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
        """Return the newest version if its save has failed and is to be retried now, or None.

        `alone_seconds` is the time since the last trainer disconnected, or 0 while any trainer is
        connected.
        """
        newest = memory.newest
        if newest is None or self.name not in newest.failures or now < self.retry_at:
            return None
        if is_stopping or alone_seconds >= linger_seconds:
            return None
        # A version of several nodes is not retried: all nodes would have to retry at the same time.
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
        """Save a version from `views` of its segments, by segment number; then remove older tags.

        The store is a parameter, because `self.store` may be replaced during the save.
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
    """Save of a tag that adds a line to Nebula's history."""

    tag = ""

    async def _record(self, outcome: str, *, num_bytes: int = 0, error: str = "") -> None:
        job, now = self._job, time.time()
        seconds = now - job.started
        end_time = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        row = (
            end_time.replace("+00:00", "Z"),
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
            _log.warning(
                "the save of %s could not be added to the history of %s: %s",
                self.tag,
                self._store.uri,
                exc,
            )


def _encode(row: tuple[object, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    return text.getvalue().encode(errors="backslashreplace")


async def _append(store: Store, row: tuple[object, ...]) -> None:
    """Append a line to the history, with three requests; two if there is no history yet.

    The whole object is read and written again, with a precondition on its generation. If another
    writer appends a line at the same time, all of this is repeated. With about 150 bytes per line,
    the object has 1.5 MB after 10,000 saves.
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
