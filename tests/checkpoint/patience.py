"""Waiting for what comes, on a machine that may stand still for a while."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from aioflux import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.testing import GCSServer

__all__ = ["PATIENCE_SECONDS", "PATIENT", "wait_until", "wait_until_idle"]

PATIENCE_SECONDS = 200.0
"""Time for what comes in a moment on a quiet machine."""

PATIENT = Timeouts(connect_seconds=100, progress_seconds=100, idle_seconds=100)
"""For those who count requests: no attempt is given up, and none is sent again, for slowness."""


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait_until_idle(server: GCSServer) -> None:
    """Wait until all is done that a process asked for which is gone; nobody else is connected."""
    before = server.stats.connections_opened
    with socket.create_connection((server.host, server.port)):
        # Who connected earlier is accepted by then.
        wait_until(lambda: server.stats.connections_opened > before)
    wait_until(lambda: not server.stats.connections_open and not server.stats.total.in_flight)
