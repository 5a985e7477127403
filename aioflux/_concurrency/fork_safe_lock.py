"""A lock for the threads of one process."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """A lock for the threads of one process. A forked child starts with a free lock.

        with lock.current:

    `current` returns a `threading.Lock`, whose `with` is safe against Ctrl-C. A Python method
    around it could be interrupted between the acquisition and the block, or before the release.
    """

    def __init__(self) -> None:
        self._by_pid: dict[int, threading.Lock] = {}

    @property
    def current(self) -> threading.Lock:
        """The lock; a new one in a forked child."""
        return self._by_pid.setdefault(os.getpid(), threading.Lock())
