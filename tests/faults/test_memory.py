"""The memory of calls, in their own process: bounded, however large the object is."""

from __future__ import annotations

import sys

import pytest

from perf.memory import MIB, Scenario, measure

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.more]

SCENARIOS = [
    # An allowance of 32 MiB for what lies between two sockets; the rest is the caller's, or bounded
    # by an option of the store.
    Scenario(call="get", size_bytes=96 * MIB, limit_bytes=(96 * 11 // 10 + 32) * MIB),
    Scenario(call="sync_get", size_bytes=96 * MIB, limit_bytes=(96 * 11 // 10 + 32) * MIB),
    Scenario(call="open_reader", size_bytes=256 * MIB, limit_bytes=(64 + 32 + 64) * MIB),
    Scenario(call="open_writer", size_bytes=256 * MIB, limit_bytes=(64 + 32 + 64) * MIB),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.call)
def test_a_call_holds_no_more_than_it_must(scenario: Scenario) -> None:
    assert measure(scenario).grown_bytes < scenario.limit_bytes
