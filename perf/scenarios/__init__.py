"""All scenarios, by name. A scenario is a frozen dataclass of its parameters."""

from __future__ import annotations

from perf.scenarios import (
    checkpoint_async,
    dcp,
    epoch,
    listing,
    loader,
    objects,
    ratios,
    ray,
    small,
    torch_files,
)
from perf.scenarios._scenario import Match, Promise, Rival, Scenario, Side

__all__ = ["GROUPS", "SCENARIOS", "Match", "Promise", "Rival", "Scenario", "Side"]

_GROUPS: dict[str, tuple[Scenario, ...]] = {
    "list": listing.SCENARIOS,
    "loader": loader.SCENARIOS,
    "epoch": epoch.SCENARIOS,
    "checkpoint_async": checkpoint_async.SCENARIOS,
    "torch_files": torch_files.SCENARIOS,
    "dcp": dcp.SCENARIOS,
    "ratios": ratios.SCENARIOS,
    "ray": ray.SCENARIOS,
    "small": small.SCENARIOS,
}
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenarios in (objects.SCENARIOS, *_GROUPS.values())
    for scenario in scenarios
}
"""Scenarios by name, in the order of a run."""
GROUPS = {group: tuple(one.name for one in scenarios) for group, scenarios in _GROUPS.items()}
"""Names of the scenarios of each group."""
