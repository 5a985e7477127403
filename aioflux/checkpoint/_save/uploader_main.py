"""The uploader process, which a Checkpointer starts as `python -m <this module>`.

    trainer --(jobs, arenas)--> uploader --(bytes sent, outcomes)--> trainer

The trainer is the process of the Checkpointer. The uploader maps the trainer's arenas. When the
trainer has exited, even if it was killed, the uploader completes its jobs and exits, so that a
staged save is not lost.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aioflux.checkpoint._save.job import Job
from aioflux.checkpoint._save.loop_uploader import SaveQueue
from aioflux.checkpoint._save.process_uploader import (
    MAX_FDS,
    MAX_READ_BYTES,
    Inbox,
    encode,
    picklable_error,
)
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from aioflux.checkpoint._save.job import SaveResult
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

_NICENESS: Final = 5
"""Added niceness: training has priority if there are too few processors for both processes."""

_CHECK_SECONDS: Final = 1.0
"""Interval of checks whether the trainer is alive. The socket alone does not show it: a forked
worker of the trainer keeps the trainer's end of the socket open."""


class _UploaderProcess:
    """The jobs and arenas of one trainer."""

    def __init__(self, jobs: socket.socket, results: socket.socket) -> None:
        self._jobs = jobs
        self._results = results
        self._trainer = os.getppid()
        self._inbox = Inbox()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._is_closed = asyncio.Event()
        """Set when the trainer has closed the socket."""
        self._store: Store | None = None
        self._queue: SaveQueue | None = None
        self._arenas: dict[int, mmap.mmap] = {}
        self._tasks: dict[int, asyncio.Task[SaveResult]] = {}
        self._recording: set[asyncio.Task[None]] = set()
        """Tasks that add saves to the history."""

    async def run(self) -> None:
        """Run jobs until the trainer has closed the socket or exited, and all jobs are complete."""
        loop = asyncio.get_running_loop()
        self._jobs.setblocking(False)
        self._results.setblocking(False)
        loop.add_reader(self._jobs.fileno(), self._read)
        sending = loop.create_task(self._send())
        while not self._is_closed.is_set() and os.getppid() == self._trainer:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closed.wait(), _CHECK_SECONDS)
        if not self._is_closed.is_set():
            self._read()  # the messages that the trainer sent before it died
        loop.remove_reader(self._jobs.fileno())
        if self._queue is not None:
            self._queue.stop_heartbeats()  # of saves that the trainer did not submit
        while tasks := {*self._tasks.values(), *self._recording}:
            await asyncio.wait(tasks)
        if self._queue is not None:
            await self._queue.close()
        if self._store is not None:
            await self._store.aclose()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._outbox.join(), _CHECK_SECONDS)
        sending.cancel()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await self._outbox.get()
            with suppress(OSError):  # the trainer has exited
                await loop.sock_sendall(self._results, data)
            self._outbox.task_done()

    def _post(self, *message: object) -> None:
        self._outbox.put_nowait(encode(message))

    def _read(self) -> None:
        """Handle all messages that the socket has received."""
        while not self._is_closed.is_set():
            try:
                data, fds, _, _ = socket.recv_fds(self._jobs, MAX_READ_BYTES, MAX_FDS)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._is_closed.set()
                return
            for message in self._inbox.feed(data, fds):
                self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case ("open", store, settings):
                self._store = store
                self._queue = SaveQueue(store, settings)
            case ("start_heartbeat", str(save_id), str(prefix), int(rank)):
                if self._queue is not None:
                    self._queue.start_heartbeat(save_id, prefix, rank)
            case ("stop_heartbeat", str(save_id)):
                if self._queue is not None:
                    self._queue.stop_heartbeat(save_id)
            case ("arena", int(number), int(size)):
                fd = self._inbox.fds.pop(0)
                self._arenas[number] = mmap.mmap(fd, size, prot=mmap.PROT_READ)
                os.close(fd)
            case ("release", int(number)):
                self._unmap(number)
            case ("cancel", int(number)):
                if (task := self._tasks.get(number)) is not None:
                    # A task that is cancelled before its first step never runs, and would not
                    # report the failure to the other ranks. So it is cancelled after this step.
                    asyncio.get_running_loop().call_soon(task.cancel)
            case ("job", int(number), Job() as job):
                task = asyncio.get_running_loop().create_task(self._run_job(number, job))
                self._tasks[number] = task
                task.add_done_callback(lambda task: self._finish_job(number, job, task))

    def _unmap(self, number: int) -> None:
        """Unmap an arena whose jobs are complete."""
        if (arena := self._arenas.pop(number, None)) is not None:
            try:
                arena.close()
            except BufferError:  # tracebacks of errors refer to slices of it, often in cycles
                gc.collect()

    async def _run_job(self, number: int, job: Job) -> SaveResult:
        if self._queue is None:
            raise CheckpointError(
                "the uploader process could not open the store; see its log for the reason, for "
                "example a credentials function that it cannot import"
            )
        arena = self._arenas.get(job.arena)
        with memoryview(b"" if arena is None else arena) as memory:
            return await self._queue.run(
                job, memory, lambda count: self._post("sent", number, count)
            )

    async def _record(self, number: int, queue: SaveQueue) -> None:
        """Add the save of a job to the history."""
        await queue.write_records()
        self._post("recorded", number, None)

    def _finish_job(self, number: int, job: Job, task: asyncio.Task[SaveResult]) -> None:
        """Post the outcome of a job."""
        del self._tasks[number]
        if self._queue is not None:
            recording = asyncio.get_running_loop().create_task(self._record(number, self._queue))
            self._recording.add(recording)
            recording.add_done_callback(self._recording.discard)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._post("done", number, task.result())
            return
        if os.getppid() != self._trainer:
            _log.error("step %d was not saved, and its trainer has exited: %s", job.step, error)
        self._post("failed", number, picklable_error(error))


def main() -> None:
    """Run the uploader; the arguments are the descriptors of the sockets to the trainer."""
    # Ctrl-C and a scheduler's SIGTERM are for the trainer; this process exits after the trainer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    jobs, results = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with jobs, results:
        asyncio.run(_UploaderProcess(jobs, results).run())


if __name__ == "__main__":
    main()
