"""SaveHandle: one save that is under way, and its outcome."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from aioflux.checkpoint._save.job import SaveResult

__all__ = ["SaveHandle", "wait_for_any"]


_log = logging.getLogger("aioflux")

_Cancelled = concurrent.futures.CancelledError
_SIGNAL_CHECK_SECONDS = 0.5
"""Time after which a waiting caller wakes to handle signals."""


class SaveHandle:
    """A save that is staged, and is uploaded and committed during training.

    It may be dropped: an error that was not read from it is raised by the next save, or by `close`.

    Attributes:
        step: The training step.
        num_bytes: Bytes that this rank staged for the upload, before compression.
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
        self._cancel: Callable[[], object] | None = None
        self._num_sent = 0
        self._is_read = False

    def __del__(self) -> None:
        if self.has_unseen_error and not isinstance(self._failure(), _Cancelled):
            _log.error(
                "step %d was not saved, and its handle was not read: %s", self.step, self._failure()
            )

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._failure() else "committed"
        return f"<SaveHandle of step {self.step}: {state}, {self.progress:.0%} sent>"

    @property
    def progress(self) -> float:
        """Share of this rank's bytes that were passed to the upload, from 0 to 1."""
        if self.done() and self._failure() is None:
            return 1.0
        return min(1.0, self._num_sent / self.num_bytes) if self.num_bytes else 0.0

    @property
    def has_unseen_error(self) -> bool:
        """Return whether it failed, and the error was not read from the handle."""
        return self.done() and not self._is_read and self._failure() is not None

    def done(self) -> bool:
        """Return whether it is committed or has failed."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait for the commit.

        Args:
            timeout: Seconds to wait; without a limit by default.

        Raises:
            TimeoutError: It is still under way, and continues. The message names the rank, the time
                since its start, and what it waits for.
            AiofluxError: It failed, and is committed on no rank.
            CancelledError: It was cancelled (`concurrent.futures`).
        """
        self._wait_for_end(timeout)
        try:
            return self._outcome.result(0)
        finally:
            self._is_read = self._is_read or self._outcome.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result`, and return the error, or None if it is committed."""
        self._wait_for_end(timeout)
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
        """Stop the upload and remove what it wrote. Too late once the commit is being written.

        With several ranks the save fails on all of them. A rank that has uploaded its part waits
        for the outcome: only rank 0 can still cancel the save then.

        Returns:
            Whether it is cancelled; False if it is committed or has failed.
        """
        if self._cancel is not None and not self.done():
            self._cancel()
        self.wait()
        return isinstance(self._failure(), _Cancelled)

    def add_done_callback(self, call: Callable[[SaveHandle], object]) -> None:
        """Call `call` with the handle when it has ended, on the thread on which it ends."""
        self._outcome.add_done_callback(lambda _: call(self))

    # For the Checkpointer and its uploads.

    def attach(self, cancel: Callable[[], object]) -> None:
        """Note that there is an upload, and what requests its cancellation."""
        self._cancel = cancel

    @property
    def is_attached(self) -> bool:
        """Return whether there is an upload, which will set the outcome."""
        return self._cancel is not None

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were passed to the upload; 0 resets the count, for another attempt."""
        self._num_sent = self._num_sent + num_bytes if num_bytes else 0

    def end(self, outcome: SaveResult | BaseException) -> None:
        """Set the outcome."""
        if self._outcome.done():
            return
        if not isinstance(outcome, BaseException):
            self._outcome.set_result(outcome)
        elif isinstance(outcome, asyncio.CancelledError):
            error = _Cancelled(f"the save of step {self.step} was cancelled")
            self._outcome.set_exception(error)
        else:
            self._outcome.set_exception(outcome)

    def take_error(self) -> BaseException | None:
        """Return an error that was not read from the handle, and count it as read."""
        if not self.has_unseen_error:
            return None
        self._is_read = True
        error = self._failure()
        if isinstance(error, _Cancelled) or not isinstance(error, Exception):
            return None  # the caller cancelled or interrupted it
        return error

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the outcome for some seconds, without reading it.

        It wakes from time to time: a signal that comes just before a thread blocks would not
        interrupt it.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (left := end - time.monotonic()) > 0:
            concurrent.futures.wait([self._outcome], min(left, _SIGNAL_CHECK_SECONDS))

    def _wait_for_end(self, timeout: float | None) -> None:
        self.wait(timeout)
        if not self.done():
            raise TimeoutError(self._describe_state())

    def _describe_state(self) -> str:
        """Return a description of its progress, for a TimeoutError."""
        seconds = time.monotonic() - self._started
        rank = f" on rank {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        if self.progress < 1.0:
            what = f"{self.progress:.0%} of its {self.num_bytes:,} bytes are sent"
        elif self._world_size == 1:
            what = "all of its bytes are sent, and it is about to be committed"
        elif self._rank == 0:
            what = "all of its bytes are sent, and it waits for the other ranks, or commits"
        else:
            what = "all of its bytes are sent, and it waits for rank 0 to commit"
        return (
            f"the save of step {self.step} to {self._uri} is under way{rank} for {seconds:.1f} s: "
            f"{what}; it continues: wait again, or cancel() it"
        )

    def _failure(self) -> BaseException | None:
        return self._outcome.exception() if self._outcome.done() else None


def wait_for_any(handles: Sequence[SaveHandle]) -> None:
    """Wait a moment for one of several saves to end: the caller asks again."""
    concurrent.futures.wait(
        [handle._outcome for handle in handles],  # noqa: SLF001  of this module
        timeout=_SIGNAL_CHECK_SECONDS,
        return_when=concurrent.futures.FIRST_COMPLETED,
    )
