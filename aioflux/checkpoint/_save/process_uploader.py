"""ProcessUploader: uploads in a process that outlives this one.

The arenas are memory that both share, so that a job is a short message. A process that dies is
started again, and receives the jobs that the first had not finished.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux import _bridge
from aioflux.checkpoint._save.uploader_messages import MAX_READ_BYTES, Inbox, send
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._save.handle import SaveHandle
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.store import Store

__all__ = ["ProcessUploader"]

_log = logging.getLogger("aioflux")

_MAX_ATTEMPTS: Final = 4
"""Attempts to upload one save: one that kills its uploader is given up."""

_SEND_SECONDS: Final = 60.0
"""Time in which an uploader has to take a message."""

_END_SECONDS: Final = 30.0
"""Time in which it ends when it is asked to."""


@dataclass(slots=True)
class _Child:
    """One uploader process."""

    process: subprocess.Popen[bytes]
    jobs: socket.socket
    results: socket.socket
    arenas: set[int] = field(default_factory=set)
    """Numbers of the arenas that it has."""


@dataclass(slots=True)
class _Pending:
    """A job that has not ended."""

    job: Job
    arena: Arena | None
    handle: SaveHandle


class ProcessUploader:
    """Uploads in another process."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        if store.uri.startswith("memory://"):
            raise ValueError(
                f'staging="process" cannot save to {store.uri}: another process has another '
                'memory; use staging="thread"'
            )
        # Pickled here, so that a store that does not pickle raises at once.
        self._opening = pickle.dumps((store, settings))
        self._lock = _bridge.ForkSafeLock()
        self._pending: dict[int, _Pending] = {}
        self._num_jobs = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._child: _Child | None = self._start()

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """See base class."""
        self._send_to_child("announce", save_id, prefix, rank)

    def withdraw(self, save_id: str) -> None:
        """See base class."""
        self._send_to_child("withdraw", save_id)

    def _send_to_child(self, *message: object) -> None:
        with self._lock.current:
            if self._child is not None:
                self._send(self._child, message)

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """See base class."""
        with self._lock.current:
            self._num_jobs += 1
            number = self._num_jobs
            try:
                handle.attach(partial(self._request_cancel, number))
                self._pending[number] = _Pending(job, arena, handle)
                child = self._child or self._restart()
                if child is not None:
                    self._send_job(child, number)
            except BaseException as exc:  # such as Ctrl-C
                self._resubmit_or_end(number, handle, exc)
                raise

    def _resubmit_or_end(self, number: int, handle: SaveHandle, error: BaseException) -> None:
        """Send a job again that may not have arrived, or end a save that was not recorded."""
        if number in self._pending and self._child is not None:
            self._child.process.kill()
            return
        self._pending.pop(number, None)
        if handle.is_attached:
            handle.end(error)

    def release(self, arena: Arena) -> None:
        """See base class."""
        with self._lock.current:
            child = self._child
            if child is not None and arena.number in child.arenas:
                child.arenas.discard(arena.number)
                self._send(child, ("release", arena.number))

    def _request_cancel(self, number: int) -> None:
        with self._lock.current:
            if self._child is not None and number in self._pending:
                self._send(self._child, ("cancel", number))

    def wait_at_exit(self, handles: Sequence[SaveHandle]) -> None:
        """See base class. The process finishes them, whatever becomes of this one."""

    def close(self) -> None:
        """See base class."""
        with self._lock.current:
            self._is_closed = True
            child = self._child
        if child is None or self._pid != os.getpid():
            return
        child.jobs.close()
        try:
            child.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        self._child = None

    def _start(self) -> _Child:
        """Start a process, and send it the store and settings."""
        jobs, its_jobs = socket.socketpair()
        results, its_results = socket.socketpair()
        with ExitStack() as pipes:
            pipes.enter_context(jobs)
            pipes.enter_context(results)
            with its_jobs, its_results:
                process = subprocess.Popen(  # noqa: S603  our own module
                    [
                        sys.executable,
                        "-m",
                        "aioflux.checkpoint._save.uploader_main",
                        str(its_jobs.fileno()),
                        str(its_results.fileno()),
                    ],
                    # A function that returns tokens is found where this process finds it.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(its_jobs.fileno(), its_results.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            pipes.pop_all()  # they stay open with the process
        jobs.settimeout(_SEND_SECONDS)
        results.setblocking(False)
        child = _Child(process, jobs, results)
        store, settings = pickle.loads(self._opening)  # noqa: S301  our own
        self._send(child, ("open", store, settings))
        # The reading is not awaited: the process continues when this one ends.
        reading = self._read_results(child)
        asyncio.run_coroutine_threadsafe(reading, _bridge.background_loop())
        return child

    def _send_job(self, child: _Child, number: int) -> None:
        pending = self._pending[number]
        arena = pending.arena
        if arena is not None and arena.number not in child.arenas:
            child.arenas.add(arena.number)
            self._send(child, ("arena", arena.number, arena.size), arena.fd)
        self._send(child, ("job", number, pending.job))

    def _send(self, child: _Child, message: object, *fds: int) -> None:
        """Send a message; a process that cannot take it is killed, and replaced when reaped."""
        try:
            send(child.jobs, message, fds)
        except OSError:
            child.process.kill()
        except BaseException:  # such as Ctrl-C: what follows half a message would be its rest
            child.process.kill()
            raise

    async def _read_results(self, child: _Child) -> None:
        """Read the messages of a process until it ends."""
        loop = asyncio.get_running_loop()
        inbox = Inbox()
        try:
            while data := await loop.sock_recv(child.results, MAX_READ_BYTES):
                for message in inbox.feed(data):
                    self._handle_result(*message)
        except OSError:
            pass  # it died while it was writing
        finally:
            child.results.close()
        await asyncio.to_thread(self._replace_dead, child)

    def _handle_result(self, kind: str, number: int, what: Any) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        if kind == "sent":
            pending.handle.advance(what)
        else:
            del self._pending[number]
            pending.handle.end(what)

    def _restart(self) -> _Child | None:
        """Start another process; if that fails, so does every save that waits for one."""
        try:
            self._child = child = self._start()
        except OSError as exc:
            waiting, self._pending = self._pending, {}
            for each in waiting.values():
                each.handle.end(
                    CheckpointError(
                        f"step {each.job.step} was not saved: the uploader process died, and no "
                        f"other could be started: {exc}"
                    )
                )
            return None
        return child

    def _replace_dead(self, child: _Child) -> None:
        """Start another process for the jobs that one that died had not finished."""
        with self._lock.current:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(_END_SECONDS)
            child.jobs.close()
            if child is self._child:
                self._child = None
            if not self._pending or self._is_closed:
                return
            _log.warning(
                "the uploader process ended with status %s; %d saves are started again",
                child.process.returncode,
                len(self._pending),
            )
            another = self._restart()
            if another is None:
                return
            for number, pending in list(self._pending.items()):
                job = pending.job
                pending.job = replace(job, attempt=job.attempt + 1)
                pending.handle.advance(0)
                if pending.job.attempt >= _MAX_ATTEMPTS:
                    del self._pending[number]
                    pending.handle.end(
                        CheckpointError(
                            f"step {job.step} was not saved: {_MAX_ATTEMPTS} uploader processes "
                            f"died of it, the last with status {child.process.returncode}"
                        )
                    )
                else:
                    self._send_job(another, number)
