"""SaveQueue: uploads of the saves of one rank on an event loop, normally one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioflux.checkpoint._save.commit_protocol import RankSave, run_to_end
from aioflux.checkpoint._save.heartbeat import Heartbeat
from aioflux.checkpoint._store.history import HistoryWriter

if TYPE_CHECKING:
    from aioflux.checkpoint._save.job import Job, SaveResult, UploadSettings
    from aioflux.store import Store


class SaveQueue:
    """The saves of one rank and their heartbeats.

    One save runs at a time, so that steps are committed in the order of the saves. Only an urgent
    save (`Job.is_urgent`) does not wait for the others.
    """

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        self._store = store
        # With a separate store a heartbeat does not wait for uploads, which may use all request
        # slots of their store for minutes.
        self.heartbeat_store = store.reopened()
        self._settings = settings
        self._history = HistoryWriter(store)
        self._lock = asyncio.Lock()
        self._early_heartbeats: dict[str, Heartbeat] = {}
        """Heartbeats of saves that `run` was not called for yet, by save id."""

    def start_heartbeat(self, save_id: str, prefix: str, rank: int) -> None:
        """Start the heartbeats of a save before `run`, because staging may take long."""
        heartbeat = self._new_heartbeat(save_id, prefix, rank, is_late=False)
        self._early_heartbeats[save_id] = heartbeat

    def stop_heartbeat(self, save_id: str) -> None:
        """Stop the heartbeats of a save that `run` was not called for; otherwise do nothing."""
        heartbeat = self._early_heartbeats.pop(save_id, None)
        if heartbeat is not None:
            heartbeat.cancel()

    def stop_heartbeats(self) -> None:
        """Stop the heartbeats of all saves that `run` was not called for."""
        for save_id in list(self._early_heartbeats):
            self.stop_heartbeat(save_id)

    def _new_heartbeat(self, save_id: str, prefix: str, rank: int, *, is_late: bool) -> Heartbeat:
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
        """Upload and commit one save, whose staged state is in `memory`.

        Raises:
            AiofluxError: The save failed on all ranks, and its objects are deleted if the service
                allows it; or its outcome is unknown.
        """
        heartbeat = self._early_heartbeats.pop(job.save_id, None)
        if heartbeat is None and job.world_size > 1:
            prefix, is_late = job.checkpoint_prefix, job.attempt > 0
            heartbeat = self._new_heartbeat(job.save_id, prefix, job.rank, is_late=is_late)
        save = RankSave(self._store, self._settings, job, memory, progress)
        try:
            return await self._run(save, is_urgent=job.is_urgent)
        finally:
            if save.record is not None:
                self._history.add(save.record)
            if heartbeat is not None:
                await run_to_end(heartbeat.stop())

    async def write_records(self) -> None:
        """Add the saves that have ended to the history, within 10 s; call this after each `run`."""
        await run_to_end(self._history.write())

    async def close(self) -> None:
        """Compact the history, and close the store of the heartbeats."""
        await self._history.close()
        await self.heartbeat_store.aclose()

    async def _run(self, save: RankSave, *, is_urgent: bool) -> SaveResult:
        if is_urgent:
            return await save.run()
        try:
            await self._lock.acquire()
        except BaseException as exc:  # cancelled before its upload
            await save.undo(exc)
            raise
        try:
            return await save.run()
        finally:
            self._lock.release()
