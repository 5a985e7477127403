"""SaveQueue: the saves of one rank, uploaded one after another on an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflux.checkpoint._save.commit_protocol import RankSave, run_to_end
from aioflux.checkpoint._save.heartbeat import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.checkpoint._save.job import Job, SaveResult, UploadSettings
    from aioflux.store import Store

__all__ = ["SaveQueue"]


class SaveQueue:
    """The saves of one rank: one at a time, so that commits are in order, with their heartbeats."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        self._store = store
        # Uploads fill the limits of their own store for minutes, and a heartbeat must not wait.
        self.heartbeat_store = store.reopened()
        self._settings = settings
        self._lock = asyncio.Lock()
        self._announced: dict[str, Heartbeat] = {}

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """Start the heartbeats of a save whose job is to come: staging may take long."""
        self._announced[save_id] = self._heartbeat(save_id, prefix, rank, is_late=False)

    def withdraw(self, save_id: str = "") -> None:
        """Stop the heartbeats of a save whose job does not come; of all such saves by default."""
        for each in [save_id] if save_id else list(self._announced):
            heartbeat = self._announced.pop(each, None)
            if heartbeat is not None:
                heartbeat.cancel()

    def _heartbeat(self, save_id: str, prefix: str, rank: int, *, is_late: bool) -> Heartbeat:
        return Heartbeat(
            self.heartbeat_store,
            prefix,
            save_id,
            rank,
            every_seconds=self._settings.heartbeat_seconds,
            is_late=is_late,
        )

    async def run(
        self, job: Job, memory: memoryview, progress: Callable[[int], None]
    ) -> SaveResult:
        """Upload and commit one save.

        Raises:
            AiofluxError: It is not committed, on any rank; what it wrote is removed as far as the
                service allows.
        """
        heartbeat = self._announced.pop(job.save_id, None)
        if heartbeat is None and job.world_size > 1:
            prefix, is_late = job.checkpoint_prefix, job.attempt > 0
            heartbeat = self._heartbeat(job.save_id, prefix, job.rank, is_late=is_late)
        try:
            return await self._run(
                RankSave(self._store, self._settings, job, memory, progress),
                is_urgent=job.is_urgent,
            )
        finally:
            if heartbeat is not None:
                await run_to_end(heartbeat.end())

    async def _run(self, save: RankSave, *, is_urgent: bool) -> SaveResult:
        if is_urgent:
            return await save.run()
        try:
            await self._lock.acquire()
        except BaseException as exc:  # cancelled while it waited
            await save.undo(exc)
            raise
        try:
            return await save.run()
        finally:
            self._lock.release()
