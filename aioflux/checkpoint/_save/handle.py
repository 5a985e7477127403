"""SaveHandle: one save that is under way, and how it ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from aioflux.checkpoint._save.job import SaveResult

__all__ = ["SaveHandle"]


_log = logging.getLogger("aioflux")

_Cancelled = concurrent.futures.CancelledError
_LOOK_UP_SECONDS = 0.5
"""Time between two looks of a waiting caller at signals."""


class _Upload(Protocol):
    """What carries a save out."""

    def cancel(self) -> None:
        """Ask it to stop; its outcome tells whether it did."""


class SaveHandle:
    """A save that was begun: staged already, uploaded and committed beside the training.

    Use it or drop it: an error that nobody took from the handle is raised by the next save, or by
    `close`.

    Attributes:
        step: The training step.
        num_bytes: Bytes that this rank uploads.
    """

    def __init__(
        self, step: int, num_bytes: int, *, uri: str = "", rank: int = 0, world_size: int = 1
    ) -> None:
        self.step = step
        self.num_bytes = num_bytes
        self._uri = uri
        self._rank = rank
        self._world_size = world_size
        self._begun = time.monotonic()
        self._outcome: concurrent.futures.Future[SaveResult] = concurrent.futures.Future()
        self._outcome.set_running_or_notify_cancel()
        self._upload: _Upload | None = None
        self._num_sent = 0
        self._is_seen = False

    def __del__(self) -> None:
        if self.has_unseen_error and not isinstance(self._failure(), _Cancelled):
            _log.error("step %d was not saved, and nobody asked: %s", self.step, self._failure())

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._failure() else "committed"
        return f"<SaveHandle of step {self.step}: {state}, {self.progress:.0%} sent>"

    @property
    def progress(self) -> float:
        """Share of this rank's bytes that went to the upload, from 0 to 1."""
        if self.done() and self._failure() is None:
            return 1.0
        return min(1.0, self._num_sent / self.num_bytes) if self.num_bytes else 0.0

    @property
    def has_unseen_error(self) -> bool:
        """Whether it failed, and nobody has asked the handle since."""
        return self.done() and not self._is_seen and self._failure() is not None

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._outcome.done()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state may be changed again, which it may when the handle is there.

        Args:
            timeout: Seconds to wait at most; nothing is waited for now.
        """

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait for the commit.

        Args:
            timeout: Seconds to wait; for ever by default.

        Raises:
            TimeoutError: It is still under way after so long, and goes on. The message says on
                which rank, since when, and what it waits for.
            AiofluxError: It failed: on no rank is it committed.
            CancelledError: It was cancelled (`concurrent.futures`).
        """
        self._wait_for_end(timeout)
        try:
            return self._outcome.result(0)
        finally:
            self._is_seen = self._is_seen or self._outcome.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result`, and return the error, or None where it is committed."""
        self._wait_for_end(timeout)
        error = self._outcome.exception(0)
        self._is_seen = True
        return error

    def __await__(self) -> Generator[Any, None, SaveResult]:
        """Wait for the commit on any event loop; to cancel the wait does not cancel the save."""
        return self._wait().__await__()

    async def _wait(self) -> SaveResult:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._outcome))
        finally:
            self._is_seen = self._is_seen or self._outcome.done()

    def cancel(self) -> bool:
        """End the upload and remove what it wrote. Too late once the commit is being written.

        With several ranks the save fails on all of them. A rank that has uploaded its part waits
        for what becomes of it: only rank 0 can still end the save then.

        Returns:
            Whether it is cancelled; False where it is committed or has failed.
        """
        if self._upload is not None and not self.done():
            self._upload.cancel()
        self.wait()
        return isinstance(self._failure(), _Cancelled)

    def add_done_callback(self, call: Callable[[SaveHandle], object]) -> None:
        """Call `call` with the handle when it has ended, on whatever thread that happens."""
        self._outcome.add_done_callback(lambda _: call(self))

    # What follows is for the Checkpointer and its uploads.

    def attach(self, upload: _Upload) -> None:
        """Name what carries the save out."""
        self._upload = upload

    @property
    def is_attached(self) -> bool:
        """Whether something carries the save out, and will say how it ended."""
        return self._upload is not None

    def advance(self, num_bytes: int) -> None:
        """Note that so many more bytes went to the upload; a new attempt begins at 0."""
        self._num_sent = self._num_sent + num_bytes if num_bytes else 0

    def end(self, outcome: SaveResult | BaseException) -> None:
        """Say how it ended."""
        if self._outcome.done():
            return
        if not isinstance(outcome, BaseException):
            self._outcome.set_result(outcome)
        elif isinstance(outcome, asyncio.CancelledError):
            told = _Cancelled(f"the save of step {self.step} was cancelled")
            self._outcome.set_exception(told)
        else:
            self._outcome.set_exception(outcome)

    def take_error(self) -> BaseException | None:
        """Return an error that nobody has seen, which now is seen."""
        if not self.has_unseen_error:
            return None
        self._is_seen = True
        error = self._failure()
        if isinstance(error, _Cancelled) or not isinstance(error, Exception):
            return None  # whoever cancelled or interrupted it knows
        return error

    @property
    def future(self) -> concurrent.futures.Future[SaveResult]:
        """Its end, without looking at how it was."""
        return self._outcome

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end for so many seconds, without looking at how it was.

        It looks up from time to time: a signal that comes just before a thread blocks would
        interrupt nothing.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (left := end - time.monotonic()) > 0:
            concurrent.futures.wait([self._outcome], min(left, _LOOK_UP_SECONDS))

    def _wait_for_end(self, timeout: float | None) -> None:
        self.wait(timeout)
        if not self.done():
            raise TimeoutError(self._describe_state())

    def _describe_state(self) -> str:
        """Say how far it is, for a caller who waits no longer."""
        seconds = time.monotonic() - self._begun
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
            f"{what}; it goes on, so ask again, or cancel() it"
        )

    def _failure(self) -> BaseException | None:
        return self._outcome.exception() if self._outcome.done() else None
