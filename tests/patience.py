"""Stores that do not take a machine that stands still for a while for a server that does."""

from __future__ import annotations

import pytest

from aioflux import Timeouts

FAR_SECONDS = 120.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the defaults of `Timeouts` far away, in this process: no request is sent again."""
    names = ("connect_seconds", "progress_seconds", "idle_seconds")
    defaults = Timeouts.__init__.__kwdefaults__ | dict.fromkeys(names, FAR_SECONDS)
    monkeypatch.setattr(Timeouts.__init__, "__kwdefaults__", defaults)
