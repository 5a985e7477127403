"""ProcessUploader: hands what is staged to a process that outlives this one.

The arenas are memory that both share, so that a job is a short message. A process that dies is
started again, and what it had not finished is handed to the next one.
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
"""Uploads of one save that may be begun: a save that kills its uploader is given up."""

_SEND_SECONDS: Final = 60.0
"""Time in which an uploader has to take a message."""

_END_SECONDS: Final = 30.0
"""Time in which it ends when it is asked to."""


@dataclass(slots=True)
class _Child:
    """One uploader process."""

    process: subprocess.Popen[bytes]
    jobs: socket.socket
    told: socket.socket
    arenas: set[int] = field(default_factory=set)
    """Those that it knows."""

    def close(self) -> None:
        self.jobs.close()
        self.told.close()


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
        # Pickled here, so that a store that does not pickle is told of at once.
        self._opening = pickle.dumps((store, settings))
        self._lock = _bridge.OwnLock()
        self._pending: dict[int, _Pending] = {}
        self._num_jobs = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._child: _Child | None = self._start()

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """See base class."""
        self._say("announce", save_id, prefix, rank)

    def withdraw(self, save_id: str) -> None:
        """See base class."""
        self._say("withdraw", save_id)

    def _say(self, *message: object) -> None:
        with self._lock.mine:
            if self._child is not None:
                self._send(self._child, message)

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
        """See base class."""
        with self._lock.mine:
            self._num_jobs += 1
            number = self._num_jobs
            try:
                handle.attach(_Cancel(self, number))
                self._pending[number] = _Pending(job, arena, handle)
                child = self._child or self._start_again()
                if child is not None:
                    self._hand_over(child, number)
            except BaseException as exc:  # such as Ctrl-C
                self._submit_later(number, handle, exc)
                raise

    def _submit_later(self, number: int, handle: SaveHandle, error: BaseException) -> None:
        """Have a job handed over anew that may not be, or end it where nobody would do so."""
        if number in self._pending and self._child is not None:
            self._child.process.kill()
            return
        self._pending.pop(number, None)
        if handle.is_attached:
            handle.end(error)

    def forget(self, arena: Arena) -> None:
        """See base class."""
        with self._lock.mine:
            child = self._child
            if child is not None and arena.number in child.arenas:
                child.arenas.discard(arena.number)
                self._send(child, ("forget", arena.number))

    def cancel(self, number: int) -> None:
        """Ask the process to stop one job."""
        with self._lock.mine:
            if self._child is not None and number in self._pending:
                self._send(self._child, ("cancel", number))

    def leave(self, handles: Sequence[SaveHandle]) -> None:
        """See base class. The process finishes them, whatever becomes of this one."""

    def close(self) -> None:
        """See base class."""
        with self._lock.mine:
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
        """Start a process and say what it serves."""
        jobs, its_jobs = socket.socketpair()
        told, its_told = socket.socketpair()
        with ExitStack() as ours:
            ours.enter_context(jobs)
            ours.enter_context(told)
            with its_jobs, its_told:
                process = subprocess.Popen(  # noqa: S603  ourselves
                    [
                        sys.executable,
                        "-m",
                        "aioflux.checkpoint._save.uploader_main",
                        str(its_jobs.fileno()),
                        str(its_told.fileno()),
                    ],
                    # A function that returns tokens is found where this process finds it.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(its_jobs.fileno(), its_told.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            ours.pop_all()  # they stay open with the process
        jobs.settimeout(_SEND_SECONDS)
        told.setblocking(False)
        child = _Child(process, jobs, told)
        store, settings = pickle.loads(self._opening)  # noqa: S301  our own
        self._send(child, ("open", store, settings))
        # Nobody waits for the listening: the process works on when this one ends.
        listening = self._listen(child)
        asyncio.run_coroutine_threadsafe(listening, _bridge.background_loop())
        return child

    def _hand_over(self, child: _Child, number: int) -> None:
        pending = self._pending[number]
        arena = pending.arena
        if arena is not None and arena.number not in child.arenas:
            child.arenas.add(arena.number)
            self._send(child, ("arena", arena.number, arena.size), arena.fd)
        self._send(child, ("job", number, pending.job))

    def _send(self, child: _Child, message: object, *fds: int) -> None:
        """Send what a process that dies meanwhile is sent again when it is found dead."""
        try:
            send(child.jobs, message, fds)
        except OSError:
            child.process.kill()
        except BaseException:  # such as Ctrl-C: what follows half a message would be its rest
            child.process.kill()
            raise

    async def _listen(self, child: _Child) -> None:
        """Hear what a process tells, until it ends."""
        loop = asyncio.get_running_loop()
        inbox = Inbox()
        try:
            while data := await loop.sock_recv(child.told, MAX_READ_BYTES):
                for message in inbox.feed(data):
                    self._take(*message)
        except OSError:
            pass  # it died with something unsaid
        finally:
            child.told.close()
        await asyncio.to_thread(self._restart, child)

    def _take(self, kind: str, number: int, what: Any) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        if kind == "sent":
            pending.handle.advance(what)
        else:
            del self._pending[number]
            pending.handle.end(what)

    def _start_again(self) -> _Child | None:
        """Start another process; where that fails, so does every save that waits for one."""
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

    def _restart(self, child: _Child) -> None:
        """Start another process where one died, for what it had not finished."""
        with self._lock.mine:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(_END_SECONDS)
            child.jobs.close()
            if child is self._child:
                self._child = None
            if not self._pending or self._is_closed:
                return
            _log.warning(
                "the uploader process ended with status %s; %d saves are begun anew",
                child.process.returncode,
                len(self._pending),
            )
            another = self._start_again()
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
                    self._hand_over(another, number)


@dataclass(frozen=True, slots=True)
class _Cancel:
    """Cancels one job."""

    uploader: ProcessUploader
    number: int

    def cancel(self) -> None:
        """Ask it to stop."""
        self.uploader.cancel(self.number)
