"""Fixtures: a store on a service in memory with scripted faults, and a clock without real time."""

from __future__ import annotations

import uuid

import pytest

from tests.quick_collection import quick_collection
from tests.transfer.clock import Clock, clock_of_this_loop
from tests.transfer.scripted_service import ScriptedService


@pytest.fixture
def scripted() -> ScriptedService:
    return ScriptedService(f"scripted-{uuid.uuid4().hex}")


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the test, which advances only when the loop waits."""
    return clock_of_this_loop(monkeypatch)


__all__ = ["quick_collection"]
