"""Who uploads what is staged: a task on the background loop, or another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from aioflux import _bridge
from aioflux.checkpoint._save.commit_protocol import Uploads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._save.handle import SaveHandle
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.store import Store

__all__ = ["LoopUploader", "Uploader"]


class Uploader(Protocol):
    """What carries saves out."""

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """Begin the heartbeats of a save that is about to be staged."""

    def withdraw(self, save_id: str) -> None:
        """End the heartbeats of a save that was announced, and is not submitted."""

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """Begin a save; the handle hears of it. The arena stays as it is until the handle ends."""

    def forget(self, arena: Arena) -> None:
        """Know that an arena is about to be given up."""

    def leave(self, handles: Sequence[SaveHandle]) -> None:
        """Wait for saves that would end with this process."""

    def close(self) -> None:
        """End when all saves have."""


class LoopUploader:
    """Uploads on the background loop of this process."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        self._uploads = Uploads(store, settings)
        _bridge.close_when_dropped(self._uploads.heartbeat_store)

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """See base class."""
        loop = _bridge.background_loop()
        loop.call_soon_threadsafe(self._uploads.announce, save_id, prefix, rank)

    def withdraw(self, save_id: str) -> None:
        """See base class."""
        _bridge.background_loop().call_soon_threadsafe(self._uploads.withdraw, save_id)

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """See base class."""
        running = _Running(self._uploads, job, arena, handle)
        try:
            handle.attach(running)
            _bridge.begin(running.run())
        except BaseException as exc:  # such as Ctrl-C, before or after it was begun
            running.cancel()
            if handle.is_attached:
                _bridge.begin(running.end_if_not_begun(exc))
            raise

    def forget(self, arena: Arena) -> None:
        """See base class."""

    def leave(self, handles: Sequence[SaveHandle]) -> None:
        """See base class."""
        for handle in handles:
            handle.wait()

    def close(self) -> None:
        """See base class."""
        _bridge.run(self._uploads.heartbeat_store.aclose())


class _Running:
    """One save on the background loop."""

    def __init__(self, uploads: Uploads, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        self._uploads = uploads
        self._job = job
        self._arena = arena
        self._handle = handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        """Carry it out; how it ends, the handle tells."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        assert self._task is not None
        memory = self._arena.view if self._arena is not None else memoryview(b"")
        try:
            if self._is_cancelled:
                self._task.cancel()
            self._handle.end(await self._uploads.run(self._job, memory, self._handle.advance))
        except BaseException as exc:
            self._handle.end(exc)
            if not isinstance(exc, Exception):
                raise

    async def end_if_not_begun(self, error: BaseException) -> None:
        """Say how it ended, unless it was begun before."""
        if self._task is None:
            self._handle.end(error)

    def cancel(self) -> None:
        """Ask it to stop; from any thread."""
        self._is_cancelled = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
