"""Background: writes and removals of checkpoints, one behind the other, on one thread."""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background"]

_log = logging.getLogger(__name__)
_LOOK_UP_SECONDS: Final = 0.2
"""How often a wait looks up: a signal that arrives just before a thread blocks interrupts
nothing."""


class Background:
    """Does in order what one thread gives it, while that thread goes on.

    A write that fails is raised by the next `check`, `make_room` or `wait`. A removal is carried
    out only where the write before it succeeded: what replaces the checkpoint is stored then.
    """

    def __init__(self, *, max_pending: int) -> None:
        self.max_pending = max_pending
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[Future[None], str] = {}
        """What has not ended, with the uri that it writes, or an empty string for a removal."""
        self._failures: deque[BaseException] = deque()
        self._is_last_stored = True

    def is_pending(self, uri: str) -> bool:
        """Tell whether a write of this uri has not ended."""
        return uri in self._running().values()

    def make_room(self) -> None:
        """Wait until another write may be submitted.

        Raises:
            BaseException: What failed before, once.
        """
        while len(writes := [each for each, uri in self._running().items() if uri]) >= (
            self.max_pending
        ):
            wait(writes, timeout=_LOOK_UP_SECONDS, return_when=FIRST_COMPLETED)
        self.check()

    def write(self, uri: str, work: Callable[[], object]) -> None:
        """Store something at `uri`."""
        self._submit(uri, self._write, uri, work)

    def remove(self, uri: str, work: Callable[[], object]) -> None:
        """Remove what is at `uri`, unless the write before it failed."""
        self._submit("", self._remove, uri, work)

    def check(self) -> None:
        """Raise what has failed since this was asked last."""
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        if failures:
            for later in failures[1:]:
                failures[0].add_note(f"after it: {later!r}")
            raise failures[0]

    def wait(self) -> None:
        """Wait until all is done.

        Raises:
            BaseException: What failed, once.
        """
        while running := self._running():
            wait(running, timeout=_LOOK_UP_SECONDS)
        self.check()

    def close(self) -> None:
        """Wait until all is done, and end the thread; it begins again when it is needed.

        Raises:
            BaseException: What failed, once.
        """
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def _running(self) -> dict[Future[None], str]:
        if self._pid != os.getpid():
            self._start()  # in a forked child: the thread of the parent does not run here
        self._pending = {each: uri for each, uri in self._pending.items() if not each.done()}
        return self._pending

    def _submit(
        self,
        written: str,
        step: Callable[[str, Callable[[], object]], None],
        uri: str,
        work: Callable[[], object],
    ) -> None:
        pending = self._running()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioflux-lightning")
        pending[self._executor.submit(step, uri, work)] = written

    def _write(self, uri: str, work: Callable[[], object]) -> None:
        self._is_last_stored = self._is_done(f"{uri} could not be stored", work)

    def _remove(self, uri: str, work: Callable[[], object]) -> None:
        if self._is_last_stored:
            self._is_done(f"{uri} could not be removed", work)
        else:
            _log.warning("%s is kept: what was to replace it could not be stored", uri)

    def _is_done(self, otherwise: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except BaseException as exc:  # raised in the caller's thread, by `check`
            # Told at once as well: the caller may be long in a step, or never come to a check.
            _log.error("%s: %s", otherwise, exc)
            self._failures.append(exc)
            return False
        return True
