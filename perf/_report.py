"""Output of a run: a JSON line for each sample, and a table for the terminal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from perf._samples import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from perf._samples import Median, Pair, Row
    from perf.scenarios import Match, Scenario

__all__ = [
    "HEADINGS",
    "cells",
    "lines_of",
    "terminal_heading",
    "terminal_row",
]

_COLUMNS = (
    ("scenario", 34),
    ("against", 16),
    ("ours/s", 9),
    ("peer/s", 9),
    ("ratio (spread)", 19),
    ("goal", 18),
    ("met", 6),
    ("CPU us", 17),
    ("CPU ratio", 18),
    ("server us", 15),
    ("peak MiB", 13),
)
"""Headings, each with the width of its column. The last columns but "CPU ratio" are ours / peer."""
HEADINGS = tuple(heading for heading, _ in _COLUMNS)
_NUM_LEFT = 2
"""Number of left-aligned columns of text; the other columns are right-aligned numbers."""


def lines_of(scenario: Scenario, match: Match, pair: Pair, notes: Sequence[str]) -> Iterator[str]:
    """Yield one JSON line for each sample of a pair.

    The line of the run has its command; the commit has the parameters of the samples.
    """
    for side, sample in (("ours", pair.ours), ("theirs", pair.theirs)):
        line = {
            "scenario": scenario.name,
            "case": match.case,
            "match": match.name,
            "side": side,
            "pair": pair.index,
            "is_warm_up": pair.is_warm_up,
            "result": asdict(sample.result) if sample.result else None,
            "error": sample.error,
            "server_notes": list(notes),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        yield json.dumps(line)


def cells(row: Row) -> tuple[str, ...]:
    """Return the text of each cell of a row, in the order of `HEADINGS`."""
    verdict = {True: "met", False: "MISSED", None: "?" if row.goal else "-"}[row.is_met]
    name = f"{row.scenario} ({row.case})" if row.case else row.scenario
    if row.figure:
        return (name, row.peer, "-", "-", row.figure, row.goal, verdict, "-", "-", "-", "-")
    return (
        name,
        row.peer,
        _rate(row.ours, row),
        _rate(row.theirs, row),
        _ratio(row.ratio, row.spread),
        row.goal or "-",
        verdict,
        _both(row, lambda median: _time(median.cpu_us)),
        _ratio(row.cpu_ratio, row.cpu_spread),
        _both(row, lambda median: _time(median.server_cpu_us)),
        _both(row, lambda median: f"{median.peak_bytes / MIB:,.0f}"),
    )


def terminal_heading() -> str:
    """Return the heading of the table for a terminal."""
    return _aligned(HEADINGS)


def terminal_row(row: Row) -> str:
    """Return a row of the table for a terminal, followed by its error."""
    text = _aligned(cells(row))
    return f"{text}\n    ! {row.error}" if row.error else text


def _aligned(words: Sequence[str]) -> str:
    columns = zip(words, _COLUMNS, strict=True)
    return " ".join(
        word.ljust(width) if at < _NUM_LEFT else word.rjust(width)
        for at, (word, (_, width)) in enumerate(columns)
    ).rstrip()


def _rate(median: Median | None, row: Row) -> str:
    if median is None:
        return "-"
    if row.size_bytes:
        return f"{median.rate * row.size_bytes / 1e9:.2f} GB"
    return f"{median.rate:,.0f}"


def _ratio(ratio: float | None, spread: tuple[float, float] | None) -> str:
    if ratio is None or spread is None:
        return "-"
    return f"{ratio:.2f}x ({spread[0]:.2f}..{spread[1]:.2f})"


def _time(microseconds: float) -> str:
    """Return microseconds as text: with a decimal below 10, in thousands from 100,000 on."""
    if microseconds >= 1e5:
        return f"{microseconds / 1e3:,.0f}k"
    return f"{microseconds:.1f}" if 0 < microseconds < 10 else f"{microseconds:,.0f}"


def _both(row: Row, word: Callable[[Median], str]) -> str:
    return " / ".join(word(median) if median else "-" for median in (row.ours, row.theirs))
