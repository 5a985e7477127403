"""Writes and removals of checkpoints, one after the other, on one background thread."""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackgroundWriter"]

_log = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.2
"""Interval at which a wait wakes for signals that arrived just before it blocked."""


class BackgroundWriter:
    """A queue of work that one thread submits and another runs in order.

    The error of a write is raised by the next `wait_for_slot`, `wait` or `close`. A removal runs
    only if the write before it succeeded: the newer checkpoint is stored then.

    Args:
        max_pending: Writes that may be pending; `wait_for_slot` waits for fewer.
    """

    def __init__(self, *, max_pending: int) -> None:
        self.max_pending = max_pending
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[Future[None], str] = {}
        """Unfinished work, with the uri that it writes, or an empty string for a removal."""
        self._failures: deque[BaseException] = deque()
        self._is_last_stored = True

    def is_pending(self, uri: str) -> bool:
        """Return whether a write of this uri has not finished."""
        return uri in self._unfinished().values()

    def wait_for_slot(self) -> None:
        """Wait until another write may be submitted.

        Raises:
            BaseException: An earlier failure, once.
        """
        while len(writes := [each for each, uri in self._unfinished().items() if uri]) >= (
            self.max_pending
        ):
            wait(writes, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        self._raise_failures()

    def write(self, uri: str, work: Callable[[], object]) -> None:
        """Submit work that stores an object at `uri`."""
        self._submit(uri, partial(self._write, uri, work))

    def remove(self, uri: str, work: Callable[[], object]) -> None:
        """Submit work that removes `uri`, unless the write before it fails."""
        self._submit("", partial(self._remove, uri, work))

    def _raise_failures(self) -> None:
        """Raise the first failure since the last call, with notes of the others."""
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        if failures:
            for later in failures[1:]:
                failures[0].add_note(f"after it: {later!r}")
            raise failures[0]

    def wait(self) -> None:
        """Wait until all work has finished.

        Raises:
            BaseException: A failure, once.
        """
        while running := self._unfinished():
            wait(running, timeout=_POLL_SECONDS)
        self._raise_failures()

    def close(self) -> None:
        """Wait until all work has finished, and end the thread; more work starts another.

        Raises:
            BaseException: A failure, once.
        """
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def _unfinished(self) -> dict[Future[None], str]:
        if self._pid != os.getpid():
            self._start()  # in a forked child: the thread of the parent does not run here
        self._pending = {each: uri for each, uri in self._pending.items() if not each.done()}
        return self._pending

    def _submit(self, written: str, run: Callable[[], None]) -> None:
        pending = self._unfinished()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioflux-lightning")
        pending[self._executor.submit(run)] = written

    def _write(self, uri: str, work: Callable[[], object]) -> None:
        self._is_last_stored = self._try(f"{uri} could not be stored", work)

    def _remove(self, uri: str, work: Callable[[], object]) -> None:
        if self._is_last_stored:
            self._try(f"{uri} could not be removed", work)
        else:
            _log.warning("%s is kept: the checkpoint that replaces it could not be stored", uri)

    def _try(self, complaint: str, work: Callable[[], object]) -> bool:
        """Run work, record its failure, and return whether it succeeded."""
        try:
            work()
        except BaseException as exc:  # raised later, in the caller's thread
            # Logged at once as well: the caller may be in a long step, or never wait.
            _log.error("%s: %s", complaint, exc)
            self._failures.append(exc)
            return False
        return True
