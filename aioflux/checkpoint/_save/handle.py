"""SaveHandle: the progress and the outcome of one save."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import queue
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux.checkpoint._save.job import SaveResult

_log = logging.getLogger("aioflux")

_Cancelled = concurrent.futures.CancelledError
_SIGNAL_CHECK_SECONDS = 0.5
"""Interval at which a waiting thread wakes, so that Python can run signal handlers."""


class SaveHandle:
    """The upload and commit of one staged save, which run during training.

    The caller need not keep the handle: if the save fails and no caller reads the error from the
    handle, the next save raises the error, or `Checkpointer.close` does.

    Attributes:
        step: The training step.
        num_bytes: Size of the data that this rank staged, in bytes, before compression.
    """

    def __init__(
        self, step: int, num_bytes: int, *, uri: str = "", rank: int = 0, world_size: int = 1
    ) -> None:
        self.step = step
        self.num_bytes = num_bytes
        self._uri = uri
        self._rank = rank
        self._world_size = world_size
        self._started = time.monotonic()
        self._outcome: concurrent.futures.Future[SaveResult] = concurrent.futures.Future()
        self._outcome.set_running_or_notify_cancel()
        # Waiting threads use these: Ctrl-C inside a method of the future could keep its lock, for
        # which the uploader would wait without end.
        self._wakes: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._ends: list[None] = []
        """Has an element when the save is complete."""
        ends, wakes = self._ends, self._wakes  # the callback must not refer to the handle
        self._outcome.add_done_callback(lambda _: ends.append(None))
        self._outcome.add_done_callback(wakes.put)
        self._cancel: Callable[[], object] | None = None
        self._num_sent = 0
        self._is_read = False

    def __del__(self) -> None:
        if self.has_unseen_error and not isinstance(self._failure(), _Cancelled):
            _log.error(
                "step %d was not saved, and no caller read the error from its handle: %s",
                self.step,
                self._failure(),
            )

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._failure() else "committed"
        return f"<SaveHandle of step {self.step}: {state}, {self.progress:.0%} sent>"

    @property
    def progress(self) -> float:
        """Share of this rank's bytes that were passed to the upload, from 0 to 1.

        With compression, the bytes are counted after compression, so that it can stay below 1 until
        the commit.
        """
        if self.is_committed:
            return 1.0
        return min(1.0, self._num_sent / self.num_bytes) if self.num_bytes else 0.0

    @property
    def is_committed(self) -> bool:
        """Return whether the step exists."""
        return self.done() and self._failure() is None

    @property
    def has_unseen_error(self) -> bool:
        """Return whether the save failed and no caller has read the error from the handle."""
        return self.done() and not self._is_read and self._failure() is not None

    def done(self) -> bool:
        """Return whether the save is committed or has failed."""
        return bool(self._ends)

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait for the commit.

        Args:
            timeout: Seconds to wait; without a limit by default.

        Raises:
            TimeoutError: The save is not complete yet, and continues. The message names the rank,
                the time since the start, and the current stage of the save.
            AiofluxError: The save failed on all ranks, or the message says that its outcome is
                unknown.
            CancelledError: The save was cancelled (`concurrent.futures`).
        """
        self._wait_until_done(timeout)
        try:
            return self._outcome.result(0)
        finally:
            self._is_read = self._is_read or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, and return the error, or None if the save is committed."""
        self._wait_until_done(timeout)
        error = self._outcome.exception(0)
        self._is_read = True
        return error

    def __await__(self) -> Generator[Any, None, SaveResult]:
        """Wait for the commit on any event loop; cancelling the wait does not cancel the save."""
        return self._wait().__await__()

    async def _wait(self) -> SaveResult:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._outcome))
        finally:
            self._is_read = self._is_read or self._outcome.done()

    def cancel(self) -> bool:
        """Stop the save, delete its objects, and wait until that is complete.

        With several ranks the save fails on all of them. There is no effect once rank 0 writes the
        commit object. A rank that has uploaded its part cannot cancel the save any more, except
        rank 0.

        Returns:
            Whether the save is cancelled; False if it is committed or has failed.
        """
        if self._cancel is not None and not self.done():
            self._cancel()
        self.wait()
        return isinstance(self._failure(), _Cancelled)

    def add_done_callback(self, call: Callable[[SaveHandle], object]) -> None:
        """Call `call` with the handle when the save is complete, on a background thread.

        If the save is complete already, `call` runs at once, on the thread of the caller.
        """
        self._outcome.add_done_callback(lambda _: call(self))

    # The methods below are for the Checkpointer and the uploader.

    def attach(self, cancel: Callable[[], object]) -> None:
        """Record that an uploader has the save and will set the outcome; `cancel` stops it."""
        self._cancel = cancel

    @property
    def is_attached(self) -> bool:
        """Return whether an uploader has the save and will set the outcome."""
        return self._cancel is not None

    def advance(self, num_bytes: int) -> None:
        """Add to the bytes passed to the upload; 0 resets the sum, for another attempt."""
        self._num_sent = self._num_sent + num_bytes if num_bytes else 0

    def set_outcome(self, outcome: SaveResult | BaseException) -> None:
        """Set the result or the error, unless the outcome is set already."""
        if self._outcome.done():
            return
        if not isinstance(outcome, BaseException):
            self._outcome.set_result(outcome)
        elif isinstance(outcome, asyncio.CancelledError):
            error = _Cancelled(f"the save of step {self.step} was cancelled")
            self._outcome.set_exception(error)
        else:
            self._outcome.set_exception(outcome)

    def pop_unread_error(self) -> BaseException | None:
        """Return the error if no caller has read it, and mark it as read."""
        if not self.has_unseen_error:
            return None
        self._is_read = True
        error = self._failure()
        if isinstance(error, _Cancelled) or not isinstance(error, Exception):
            return None  # the caller cancelled or interrupted the save
        return error

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the outcome up to `timeout` seconds, and leave it unread.

        The thread wakes at an interval: a signal that arrives just before the thread blocks would
        otherwise not interrupt the wait.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (remaining := end - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._wakes.put(self._wakes.get(timeout=min(remaining, _SIGNAL_CHECK_SECONDS)))

    def _wait_until_done(self, timeout: float | None) -> None:
        self.wait(timeout)
        if not self.done():
            raise TimeoutError(self._describe_state())

    def _describe_state(self) -> str:
        """Describe the stage of a save that is not complete, for a TimeoutError."""
        seconds = time.monotonic() - self._started
        rank = f" on rank {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        if self.progress < 1.0:
            stage = f"{self.progress:.0%} of its {self.num_bytes:,} bytes are sent"
        elif self._world_size == 1:
            stage = "all of its bytes are sent, and the commit is next"
        elif self._rank == 0:
            stage = "all of its bytes are sent, and it waits for the other ranks, or commits"
        else:
            stage = "all of its bytes are sent, and it waits for rank 0 to commit"
        return (
            f"the save of step {self.step} to {self._uri} is not complete{rank} after "
            f"{seconds:.1f} s: {stage}; it continues: wait again, or call cancel()"
        )

    def _failure(self) -> BaseException | None:
        return self._outcome.exception() if self.done() else None


def wait_for_any(handles: Sequence[SaveHandle]) -> None:
    """Wait until one of several saves is complete, or for half a second."""
    concurrent.futures.wait(
        [handle._outcome for handle in handles],  # noqa: SLF001  of this module
        timeout=_SIGNAL_CHECK_SECONDS,
        return_when=concurrent.futures.FIRST_COMPLETED,
    )
