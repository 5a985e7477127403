"""Timeouts that a slow machine does not reach, and waits for conditions."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from aioflux import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.testing import GCSServer

__all__ = ["PATIENCE_SECONDS", "PATIENT", "patient", "wait_until", "wait_until_idle"]

FAR_SECONDS = 120.0

PATIENCE_SECONDS = 200.0
"""Limit of a wait; on an idle machine the wait is short."""

PATIENT = Timeouts(connect_seconds=100, progress_seconds=100, idle_seconds=100)
"""Timeouts for tests that count requests, so that no slow request is retried."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the defaults of `Timeouts` in this process, so that no slow request is retried."""
    names = ("connect_seconds", "progress_seconds", "idle_seconds")
    for name in names:
        monkeypatch.setitem(Timeouts.__init__.__kwdefaults__, name, FAR_SECONDS)


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait_until_idle(server: GCSServer) -> None:
    """Wait until the server has handled all requests of a killed process, its only client."""
    before = server.stats.connections_opened
    with socket.create_connection((server.host, server.port)):
        # Earlier connections are accepted by then.
        wait_until(lambda: server.stats.connections_opened > before)
    wait_until(lambda: not server.stats.connections_open and not server.stats.total.in_flight)
