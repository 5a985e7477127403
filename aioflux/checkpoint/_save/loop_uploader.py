"""Uploads of the saves of one rank on an event loop.

SaveQueue      runs the saves on the running event loop, normally one at a time
Uploader       the interface of uploaders
LoopUploader   uploads on the background loop of this process
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from aioflux import _bridge
from aioflux.checkpoint._save.manifests import Heartbeat
from aioflux.checkpoint._save.save import Save, run_to_end
from aioflux.checkpoint._store.history import HistoryWriter

if TYPE_CHECKING:
    from aioflux.checkpoint._save.handle import SaveHandle
    from aioflux.checkpoint._save.job import Job, SaveResult, UploadSettings
    from aioflux.checkpoint._save.staging import Arena
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
        save = Save(self._store, self._settings, job, memory, progress)
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

    async def _run(self, save: Save, *, is_urgent: bool) -> SaveResult:
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


class Uploader(Protocol):
    """Interface of classes that upload and commit staged saves."""

    def start_heartbeat(self, save_id: str, prefix: str, rank: int) -> None:
        """Start the heartbeats of a save before it is staged."""

    def stop_heartbeat(self, save_id: str) -> None:
        """Stop the heartbeats of a save if it was not submitted; otherwise do nothing."""

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """Start an upload, which sets the outcome on the handle.

        The arena must not change before the outcome is set.
        """

    def release(self, arena: Arena) -> None:
        """Release mappings of an arena before the caller closes it."""

    def wait_at_exit(self, handles: Sequence[SaveHandle]) -> None:
        """Wait for the saves, and their records, that the exit of this process would stop."""

    def wait_for_records(self) -> None:
        """Wait until the completed saves are in the history, for at most 10 s."""

    def close(self) -> None:
        """Release the resources of the uploader; call this after all saves are complete."""


class LoopUploader:
    """Uploader on the background loop of this process."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        self._queue = SaveQueue(store, settings)
        _bridge.close_when_dropped(self._queue.heartbeat_store)

    def start_heartbeat(self, save_id: str, prefix: str, rank: int) -> None:
        loop = _bridge.background_loop()
        loop.call_soon_threadsafe(self._queue.start_heartbeat, save_id, prefix, rank)

    def stop_heartbeat(self, save_id: str) -> None:
        _bridge.background_loop().call_soon_threadsafe(self._queue.stop_heartbeat, save_id)

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        queued = _QueuedSave(self._queue, job, arena, handle)
        try:
            handle.attach(queued.cancel)
            _bridge.submit(queued.run())
        except BaseException as exc:  # such as Ctrl-C, before or after the save was started
            queued.cancel()
            if handle.is_attached:
                _bridge.submit(queued.fail_if_not_started(exc))
            raise

    def release(self, arena: Arena) -> None:
        """Do nothing: this uploader maps no arena."""

    def wait_at_exit(self, handles: Sequence[SaveHandle]) -> None:
        for handle in handles:
            handle.wait()
        self.wait_for_records()

    def wait_for_records(self) -> None:
        _bridge.run(self._queue.write_records())

    def close(self) -> None:
        _bridge.run(self._queue.close())


class _QueuedSave:
    """One save on the background loop."""

    def __init__(self, queue: SaveQueue, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        self._queue = queue
        self._job = job
        self._arena = arena
        self._handle = handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        """Run the save, and set its outcome on the handle."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        assert self._task is not None
        memory = self._arena.view if self._arena is not None else memoryview(b"")
        try:
            if self._is_cancelled:
                self._task.cancel()
            result = await self._queue.run(self._job, memory, self._handle.advance)
            self._handle.set_outcome(result)
        except BaseException as exc:
            self._handle.set_outcome(exc)
            if not isinstance(exc, Exception):
                raise
        finally:
            await self._queue.write_records()  # the caller of `run` does not wait for this

    async def fail_if_not_started(self, error: BaseException) -> None:
        """Set the error as the outcome, unless `run` has started."""
        if self._task is None:
            self._handle.set_outcome(error)

    def cancel(self) -> None:
        """Request the cancellation of the save; callable from any thread."""
        self._is_cancelled = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
