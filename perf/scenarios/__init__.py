"""The scenarios, by name: each a frozen dataclass of its parameters."""

from __future__ import annotations

from perf.scenarios import (
    faults,
    get_into,
    get_many,
    get_one,
    latency,
    paced,
    put_many,
    put_one,
    sync_facade,
)
from perf.scenarios._scenario import Match, MemoryGoal, Rival, Scenario, Turn

__all__ = ["SCENARIOS", "Match", "MemoryGoal", "Rival", "Scenario", "Turn"]

_MODULES = (get_many, get_one, get_into, latency, paced, put_one, put_many, sync_facade, faults)
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for module in _MODULES for scenario in module.SCENARIOS
}
"""In the order in which they are run."""
