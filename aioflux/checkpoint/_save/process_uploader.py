"""ProcessUploader: uploads by another process, which completes them even if this one exits.

The two processes share the memory of the arenas, so that a job is a short message. If the uploader
process dies, another one is started and receives the jobs that are not complete.

A message is a length and a pickle, over a socket. The descriptor of an arena is sent with the
message that names the arena. Unpickling is safe here: the trainer started the uploader process, and
no other process has the socket.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux import _bridge
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from aioflux.checkpoint._save.handle import SaveHandle
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

_HEAD: Final = struct.Struct(">Q")

MAX_READ_BYTES: Final = 1024 * 1024
MAX_FDS: Final = 16

_MAX_ATTEMPTS: Final = 4
"""Attempts to upload one save. The save fails if the uploader process dies in each attempt."""

_SEND_SECONDS: Final = 60.0
"""Timeout of sending a message to the uploader process."""

_RECORD_SECONDS: Final = 10.0
"""Timeout of a reader of the history that waits for the records of completed saves."""

_EXIT_SECONDS: Final = 30.0
"""Timeout of the exit of the uploader process, after its last job."""


def encode(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def send(target: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors; blocks until the socket's buffer has all bytes."""
    data = encode(message)
    sent = socket.send_fds(target, [data], list(fds)) if fds else 0
    target.sendall(memoryview(data)[sent:])


class Inbox:
    """Decoder of received bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.fds: list[int] = []
        """Received descriptors. The handler of a message removes the descriptors it uses."""

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> Iterator[Any]:
        """Add received bytes, and yield the messages that are complete."""
        self._data += data
        self.fds += fds
        while len(self._data) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            message = bytes(memoryview(self._data)[_HEAD.size : end])
            del self._data[:end]
            yield pickle.loads(message)  # noqa: S301  see the module's docstring


def picklable_error(error: BaseException) -> BaseException:
    """Return the error; if it cannot be pickled, a CheckpointError with its class and message."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error


@dataclass(slots=True)
class _Child:
    """One uploader process."""

    process: subprocess.Popen[bytes]
    jobs: socket.socket
    results: socket.socket
    arenas: set[int] = field(default_factory=set)
    """Numbers of the arenas that the process has mapped."""


@dataclass(slots=True)
class _Pending:
    """A job that is not complete."""

    job: Job
    arena: Arena | None
    handle: SaveHandle


class ProcessUploader:
    """Uploader in another process."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        if store.uri.startswith("memory://"):
            raise ValueError(
                f'staging="process" cannot save to {store.uri}: its objects exist only in '
                'the memory of this process; use staging="thread"'
            )
        # Pickle the store now: if that is impossible, the constructor raises, not the first save.
        self._pickled_setup = pickle.dumps((store, settings))
        self._lock = _bridge.ForkSafeLock()
        self._pending: dict[int, _Pending] = {}
        self._unrecorded: dict[int, concurrent.futures.Future[None]] = {}
        """Completed jobs whose saves may not be in the history yet."""
        self._num_jobs = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._child: _Child | None = self._start()

    def start_heartbeat(self, save_id: str, prefix: str, rank: int) -> None:
        self._send_to_child("start_heartbeat", save_id, prefix, rank)

    def stop_heartbeat(self, save_id: str) -> None:
        self._send_to_child("stop_heartbeat", save_id)

    def _send_to_child(self, *message: object) -> None:
        with self._lock.current:
            if self._child is not None:
                self._send(self._child, message)

    def submit(self, job: Job, arena: Arena | None, handle: SaveHandle) -> None:
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
                self._resubmit_or_fail(number, handle, exc)
                raise

    def _resubmit_or_fail(self, number: int, handle: SaveHandle, error: BaseException) -> None:
        """Handle an interrupted `submit`, after which the job may be sent, half sent, or not sent.

        A pending job is sent again: the process is killed, and its replacement receives all pending
        jobs. Otherwise the save fails.
        """
        if number in self._pending and self._child is not None:
            self._child.process.kill()
            return
        self._pending.pop(number, None)
        if handle.is_attached:
            handle.set_outcome(error)

    def release(self, arena: Arena) -> None:
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
        """Return at once: the uploader process completes the saves after this process exits."""

    def wait_for_records(self) -> None:
        concurrent.futures.wait(list(self._unrecorded.values()), _RECORD_SECONDS)

    def close(self) -> None:
        with self._lock.current:
            self._is_closed = True
            child = self._child
        if child is None or self._pid != os.getpid():
            return
        child.jobs.close()
        try:
            child.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        self._child = None

    def _start(self) -> _Child:
        """Start an uploader process, and send it the store and the settings."""
        jobs, child_jobs = socket.socketpair()
        results, child_results = socket.socketpair()
        with ExitStack() as on_error:
            on_error.enter_context(jobs)
            on_error.enter_context(results)
            with child_jobs, child_results:
                process = subprocess.Popen(  # noqa: S603  our own module
                    [
                        sys.executable,
                        "-m",
                        "aioflux.checkpoint._save.uploader_main",
                        str(child_jobs.fileno()),
                        str(child_results.fileno()),
                    ],
                    # So that the child can import the module of a credentials function.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(child_jobs.fileno(), child_results.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            on_error.pop_all()  # the process has started: keep the sockets open
        jobs.settimeout(_SEND_SECONDS)
        results.setblocking(False)
        child = _Child(process, jobs, results)
        store, settings = pickle.loads(self._pickled_setup)  # noqa: S301  our own
        self._send(child, ("open", store, settings))
        # Not awaited when this process exits, because the child may run longer.
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
        """Send a message. If that fails, kill the process; `_replace_dead` replaces it."""
        try:
            send(child.jobs, message, fds)
        except OSError:
            child.process.kill()
        except BaseException:  # such as Ctrl-C: half a message may be sent, so no other can follow
            child.process.kill()
            raise

    async def _read_results(self, child: _Child) -> None:
        """Handle the messages of a process until it exits, then replace it if needed."""
        loop = asyncio.get_running_loop()
        inbox = Inbox()
        try:
            while data := await loop.sock_recv(child.results, MAX_READ_BYTES):
                for message in inbox.feed(data):
                    self._handle_result(*message)
        except OSError:
            pass  # the process died during a write
        finally:
            child.results.close()
        await asyncio.to_thread(self._replace_dead, child)

    def _handle_result(self, kind: str, number: int, content: Any) -> None:
        pending = self._pending.get(number)
        if kind == "recorded":
            if (recorded := self._unrecorded.pop(number, None)) is not None:
                recorded.set_result(None)
        elif pending is None:
            return
        elif kind == "sent":
            pending.handle.advance(content)
        else:
            del self._pending[number]
            self._unrecorded[number] = concurrent.futures.Future()
            pending.handle.set_outcome(content)

    def _restart(self) -> _Child | None:
        """Start another process; if that fails, all pending saves fail."""
        try:
            self._child = child = self._start()
        except OSError as exc:
            failed, self._pending = self._pending, {}
            for pending in failed.values():
                pending.handle.set_outcome(
                    CheckpointError(
                        f"step {pending.job.step} was not saved: the uploader process died, and "
                        f"no other could be started: {exc}"
                    )
                )
            return None
        return child

    def _replace_dead(self, child: _Child) -> None:
        """Start another process for the pending jobs of a process that died."""
        while self._unrecorded:
            self._unrecorded.popitem()[1].set_result(None)
        with self._lock.current:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(_EXIT_SECONDS)
            child.jobs.close()
            if child is self._child:
                self._child = None
            if not self._pending or self._is_closed:
                return
            _log.warning(
                "the uploader process exited with status %s; starting %d saves again",
                child.process.returncode,
                len(self._pending),
            )
            new_child = self._restart()
            if new_child is None:
                return
            for number, pending in list(self._pending.items()):
                job = pending.job
                pending.job = replace(job, attempt=job.attempt + 1)
                pending.handle.advance(0)
                if pending.job.attempt >= _MAX_ATTEMPTS:
                    del self._pending[number]
                    pending.handle.set_outcome(
                        CheckpointError(
                            f"step {job.step} was not saved: {_MAX_ATTEMPTS} uploader processes "
                            f"died during its upload, the last one with exit status "
                            f"{child.process.returncode}; see the log for their errors"
                        )
                    )
                else:
                    self._send_job(new_child, number)
