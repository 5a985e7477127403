"""From the memory of a node to a store, with a line in `checkpointHistories.csv` for each save."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from aioflux.checkpoint._save.tag_save import TagSave
from aioflux.compat.nebula._histories import Line, append
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._format.commit import StoredObject
    from aioflux.checkpoint._maintain.history import Outcome
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._save.tag_save import PartData
    from aioflux.store import Store

__all__ = ["NebulaSave"]

_log = logging.getLogger("aioflux")


class NebulaSave(TagSave):
    """One save of one node."""

    def __init__(
        self,
        store: Store,
        settings: UploadSettings,
        job: Job,
        tag: str,
        parts: Sequence[PartData | StoredObject],
    ) -> None:
        super().__init__(store, settings, job, parts)
        self._tag = tag
        self._started = time.monotonic()

    async def _record(self, outcome: Outcome, *, num_bytes: int = 0, error: str = "") -> None:
        line = Line(
            tag=self._tag,
            outcome=outcome,
            num_files=self.num_files,
            size_bytes=num_bytes,
            blocked_seconds=self._job.staged_seconds,
            duration_seconds=time.monotonic() - self._started,
            num_nodes=self._job.world_size,
            save_id=self._job.save_id,
            error=error,
        )
        try:
            await append(self._store, line)
        except AiofluxError as exc:
            _log.warning("the history of %s misses %s: %s", self._store.uri, self._tag, exc)
