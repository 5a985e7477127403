"""All scenarios, by name. A scenario is a frozen dataclass of its parameters."""

from __future__ import annotations

from perf.scenarios import (
    checkpoint_async,
    checkpoint_load,
    checkpoint_save,
    clouds,
    compression,
    dcp,
    epoch,
    faults,
    get_into,
    get_many,
    get_one,
    latency,
    listing,
    loader,
    mlperf,
    paced,
    put_many,
    put_one,
    ratios,
    ray,
    small,
    startup,
    sync_facade,
    torch_files,
)
from perf.scenarios._scenario import Match, MemoryGoal, Promise, Rival, Scenario, Side

__all__ = ["GROUPS", "SCENARIOS", "Match", "MemoryGoal", "Promise", "Rival", "Scenario", "Side"]

_GROUPS = (
    *(listing, loader, epoch),
    *(checkpoint_save, checkpoint_load, checkpoint_async, torch_files, compression, dcp),
    *(mlperf, clouds, ratios, ray, small),
)
_MODULES = (
    *(get_many, get_one, get_into, latency, paced, put_one, put_many, sync_facade, startup, faults),
    *_GROUPS,
)
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for module in _MODULES for scenario in module.SCENARIOS
}
"""Scenarios by name, in the order of a run."""
GROUPS: dict[str, tuple[str, ...]] = {
    module.GROUP: tuple(scenario.name for scenario in module.SCENARIOS) for module in _GROUPS
}
"""Names of the scenarios of each group."""
