"""Background thread that writes and removes checkpoints, one after the other."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Final

_log = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.2
"""Interval at which a blocked wait wakes up to handle signals. Without it, a signal that arrives
just before the wait blocks would be handled only when the wait returns."""


class BackgroundWriter:
    """Queue of writes and removals that a background thread runs in order.

    Each error is raised once, by the next `wait_for_slot`, `wait` or `close`. A removal runs
    only if the last write succeeded: a checkpoint is kept until a newer one is stored.

    Args:
        max_pending: Maximum number of pending writes; `wait_for_slot` waits until there are fewer.
    """

    def __init__(self, *, max_pending: int) -> None:
        self.max_pending = max_pending
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[Future[None], str] = {}
        """Futures of unfinished work; the value is the uri of a write, or "" for a removal."""
        self._failures: deque[BaseException] = deque()
        self._last_write_succeeded = True

    def is_pending(self, uri: str) -> bool:
        """Return whether a write of the uri is unfinished."""
        return uri in self._unfinished().values()

    def wait_for_slot(self) -> None:
        """Wait until another write may be submitted."""
        while len(writes := [future for future, uri in self._unfinished().items() if uri]) >= (
            self.max_pending
        ):
            wait(writes, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        self._raise_failures()

    def write(self, uri: str, work: Callable[[], object]) -> None:
        """Submit work that stores a checkpoint at `uri`."""
        self._submit(uri, partial(self._write, uri, work))

    def remove(self, uri: str, work: Callable[[], object]) -> None:
        """Submit work that removes the checkpoint at `uri`; skipped if the last write failed."""
        self._submit("", partial(self._remove, uri, work))

    def _raise_failures(self) -> None:
        """Raise the first failure since the last call; later failures become its notes."""
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        if failures:
            for later in failures[1:]:
                failures[0].add_note(f"later failure: {later!r}")
            raise failures[0]

    def wait(self) -> None:
        """Wait until all work has finished."""
        while running := self._unfinished():
            wait(running, timeout=_POLL_SECONDS)
        self._raise_failures()

    def close(self) -> None:
        """Wait until all work has finished, and stop the thread; later work starts a new thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def _unfinished(self) -> dict[Future[None], str]:
        if self._pid != os.getpid():
            self._start()  # The parent's thread does not exist in a forked child.
        pending = self._pending.items()
        self._pending = {future: uri for future, uri in pending if not future.done()}
        return self._pending

    def _submit(self, uri: str, work: Callable[[], None]) -> None:
        pending = self._unfinished()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioflux-lightning")
        pending[self._executor.submit(work)] = uri

    def _write(self, uri: str, work: Callable[[], object]) -> None:
        self._last_write_succeeded = self._run(f"{uri} could not be stored", work)

    def _remove(self, uri: str, work: Callable[[], object]) -> None:
        if self._last_write_succeeded:
            self._run(f"{uri} could not be removed", work)
        else:
            _log.warning("%s is not removed: the newer checkpoint could not be stored", uri)

    def _run(self, error_message: str, work: Callable[[], object]) -> bool:
        """Run work, record a failure, and return whether the work succeeded."""
        try:
            work()
        except BaseException as exc:  # raised later, in the caller's thread
            # Log the error now, too: the caller may wait much later, or never.
            _log.error("%s: %s", error_message, exc)
            self._failures.append(exc)
            return False
        return True
