"""Plot of one scenario: every sample, the medians and the goals."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from perf._samples import Pair
    from perf.scenarios import Match, Scenario

__all__ = ["MISSING", "is_possible", "places", "plot"]

MISSING = "no plots: matplotlib is missing (pip install matplotlib)"
_OURS, _THEIRS, _POINT, _GOAL = "#1f77b4", "#b0b0b0", "#333333", "#d62728"
_WIDTH = 0.38
"""Width of a bar. Each match has two bars in a space of width 1."""


def is_possible() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return False
    return True


def plot(scenario: Scenario, played: Sequence[tuple[Match, Sequence[Pair]]], target: Path) -> None:
    """Draw the matches of a scenario to a PNG file.

    Each match has two bars, for aioflux and for the other side. The height of a bar is the median
    rate. Points are samples, without the warm-up pair. A red line is the goal of aioflux.

    Args:
        scenario: The scenario.
        played: Matches with their pairs.
        target: Path of the PNG file.
    """
    # Imported here, so that runs work without matplotlib.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        figsize=(max(5.0, 1.5 + 1.25 * len(played)), 4.5), layout="constrained"
    )
    try:
        unit = scenario.displayed_bytes / 1e9 if scenario.displayed_bytes else 1.0
        for at, (match, pairs) in enumerate(played):
            _draw(axes, at, match, pairs, unit)
        labels = [f"{match.name}\n{match.case}".strip() for match, _ in played]
        axes.set_xticks(range(len(played)), labels)
        axes.set_ylabel("GB/s" if scenario.displayed_bytes else "objects/s")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{scenario.name}: aioflux (blue), peers (grey), goals (red)")
        figure.savefig(target, dpi=110)
    finally:
        pyplot.close(figure)


def _draw(axes: Axes, at: int, match: Match, pairs: Sequence[Pair], unit: float) -> None:
    counted = [pair for pair in pairs if not pair.is_warm_up]
    ours = [pair.ours.result.rate * unit for pair in counted if pair.ours.result]
    theirs = [
        min(pair.theirs.result.rate, match.cap_per_second) * unit
        for pair in counted
        if pair.theirs.result
    ]
    for middle, rates, colour in (
        (at - _WIDTH / 2, ours, _OURS),
        (at + _WIDTH / 2, theirs, _THEIRS),
    ):
        if not rates:
            axes.annotate("failed", (middle, 0), ha="center", va="bottom", rotation=90)
            continue
        axes.bar(middle, statistics.median(rates), _WIDTH, color=colour, zorder=1)
        spread = [middle + _WIDTH * (place - 0.5) * 0.6 for place in places(len(rates))]
        axes.scatter(spread, rates, s=12, color=_POINT, zorder=3)
    if theirs and match.at_least is not None:
        goal = match.at_least * statistics.median(theirs)
        axes.hlines(goal, at - _WIDTH, at, color=_GOAL, zorder=2)


def places(count: int) -> list[float]:
    """Return `count` evenly spaced positions from 0 to 1."""
    return [0.5] if count == 1 else [index / (count - 1) for index in range(count)]
