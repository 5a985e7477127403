"""LoopUploader: uploads on the background loop of this process; and the interface of uploaders."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from aioflux import _bridge
from aioflux.checkpoint._save.save_queue import SaveQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._save.handle import SaveHandle
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.store import Store

__all__ = ["LoopUploader", "Uploader"]


class Uploader(Protocol):
    """Uploads and commits staged saves."""

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """Start the heartbeats of a save that is about to be staged."""

    def withdraw(self, save_id: str) -> None:
        """Stop the heartbeats of a save that was announced, and is not submitted."""

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """Start a save, and set its outcome on the handle; until then the arena must not change."""

    def release(self, arena: Arena) -> None:
        """Drop what is held of an arena that is about to be closed."""

    def wait_at_exit(self, handles: Sequence[SaveHandle]) -> None:
        """Wait for saves that cannot outlive this process, which ends."""

    def close(self) -> None:
        """Release the resources of the uploader, after all saves."""


class LoopUploader:
    """Uploads on the background loop of this process."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        self._queue = SaveQueue(store, settings)
        _bridge.close_when_dropped(self._queue.heartbeat_store)

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """See base class."""
        loop = _bridge.background_loop()
        loop.call_soon_threadsafe(self._queue.announce, save_id, prefix, rank)

    def withdraw(self, save_id: str) -> None:
        """See base class."""
        _bridge.background_loop().call_soon_threadsafe(self._queue.withdraw, save_id)

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """See base class."""
        running = _QueuedSave(self._queue, job, arena, handle)
        try:
            handle.attach(running.cancel)
            _bridge.begin(running.run())
        except BaseException as exc:  # such as Ctrl-C, before or after it was started
            running.cancel()
            if handle.is_attached:
                _bridge.begin(running.end_if_not_started(exc))
            raise

    def release(self, arena: Arena) -> None:
        """See base class."""

    def wait_at_exit(self, handles: Sequence[SaveHandle]) -> None:
        """See base class."""
        for handle in handles:
            handle.wait()

    def close(self) -> None:
        """See base class."""
        _bridge.run(self._queue.heartbeat_store.aclose())


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
            self._handle.end(await self._queue.run(self._job, memory, self._handle.advance))
        except BaseException as exc:
            self._handle.end(exc)
            if not isinstance(exc, Exception):
                raise

    async def end_if_not_started(self, error: BaseException) -> None:
        """Set the outcome, unless the save was started before."""
        if self._task is None:
            self._handle.end(error)

    def cancel(self) -> None:
        """Request a cancellation; from any thread."""
        self._is_cancelled = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
