"""Uploader, the interface of uploaders; LoopUploader, which uploads on the background loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from aioflux import _bridge
from aioflux.checkpoint._save.save_queue import SaveQueue

if TYPE_CHECKING:
    from aioflux.checkpoint._save.handle import SaveHandle
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.store import Store


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
