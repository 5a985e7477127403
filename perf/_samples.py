"""Samples, and the figures computed from them: rates, ratios, and goals met or missed. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from perf.scenarios import Match, Promise
    from perf.work import Work

__all__ = [
    "MIB",
    "Median",
    "Pair",
    "Result",
    "Row",
    "Sample",
    "goal_of",
    "judge",
    "judge_promise",
    "median_of",
    "promised",
    "ratio_of",
    "unplayed",
]

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures that a contender's process reports; see `perf.work.measure`."""

    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    num_objects: int
    num_bytes: int
    idle_bytes: int
    peak_bytes: int
    num_requests: int = 0
    num_faults: int = 0
    waited_seconds: float = 0.0

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Result:
        """Build a result from the JSON line that the process printed."""
        return cls(**{name: line[name] for name in cls.__dataclass_fields__ if name in line})

    @property
    def rate(self) -> float:
        """Objects per second."""
        return self.num_objects / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of an object, in microseconds."""
        return 1e6 * self.cpu_seconds / self.num_objects


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement of one contender."""

    work: Work
    result: Result | None = None
    """None if the sample failed."""
    error: str = ""
    """Error of a failed sample; otherwise empty."""
    is_too_slow: bool = False
    """Whether the sample failed because it exceeded the time limit."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two samples measured one after the other: first aioflux, then the other side."""

    index: int
    """Counted from 0."""
    is_warm_up: bool
    """Whether the pair is logged, but not used for rates and ratios."""
    ours: Sample
    theirs: Sample


@dataclass(frozen=True, kw_only=True)
class Median:
    """Medians of one contender over the pairs that count."""

    rate: float
    """Objects per second."""
    cpu_us: float
    """CPU time per object, in microseconds."""
    server_cpu_us: float
    """The server's CPU time per object, in microseconds."""
    peak_bytes: int
    """Maximum resident memory over the pairs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a match, or a goal of aioflux alone."""

    scenario: str
    case: str
    peer: str
    size_bytes: int
    """Size of an object, if rates are shown in bytes; 0 if they are shown in objects."""
    ours: Median | None = None
    theirs: Median | None = None
    """Medians of the other side; the rate is limited to the cap of the match."""
    ratio: float | None = None
    """Median over the pairs."""
    spread: tuple[float, float] | None = None
    """Smallest and largest ratio of a pair."""
    cpu_ratio: float | None = None
    """CPU time of an object divided by that of the other side: the median over the pairs."""
    cpu_spread: tuple[float, float] | None = None
    """Smallest and largest of these ratios."""
    figure: str = ""
    """Formatted figure, in the row of a `Promise`; otherwise empty."""
    goal: str = ""
    """Formatted goal; empty if there is none."""
    is_met: bool | None = None
    """Whether the goal is met; None without a goal or without a complete pair."""
    error: str = ""
    """Errors and their number."""


def ratio_of(ours: Result, theirs: Result, cap_per_second: float) -> float:
    """Return our rate divided by their rate, or by the cap if the cap is lower."""
    return ours.rate / min(theirs.rate, cap_per_second)


def median_of(results: Sequence[Result]) -> Median | None:
    """Return the medians of the results; None without results."""
    if not results:
        return None
    return Median(
        rate=statistics.median(result.rate for result in results),
        cpu_us=statistics.median(result.cpu_us for result in results),
        server_cpu_us=statistics.median(
            1e6 * result.server_cpu_seconds / result.num_objects for result in results
        ),
        peak_bytes=max(result.peak_bytes for result in results),
    )


def judge(scenario: str, size_bytes: int, match: Match, pairs: Sequence[Pair]) -> Row:
    """Return the row of a match: ratios of the complete pairs, and all failures.

    The goals are met if all of the median ratios reach them and no sample of aioflux failed.
    Without a complete pair, `is_met` is None.
    """
    counted = [pair for pair in pairs if not pair.is_warm_up]
    whole = [
        (pair.ours.result, pair.theirs.result)
        for pair in counted
        if pair.ours.result is not None and pair.theirs.result is not None
    ]
    ratios = [ratio_of(ours, theirs, match.cap_per_second) for ours, theirs in whole]
    # The CPU time of a memory copy or of a short sample can be 0.
    cpu_ratios = [ours.cpu_us / theirs.cpu_us for ours, theirs in whole if theirs.cpu_us]
    ours = median_of(_results(pair.ours for pair in counted))
    theirs = median_of(_results(pair.theirs for pair in counted))
    memory_ratio = None
    if ours and theirs and theirs.peak_bytes:
        memory_ratio = ours.peak_bytes / theirs.peak_bytes
    ratio, cpu_ratio = _median(ratios), _median(cpu_ratios)
    kept = [
        found is not None and (found >= goal if is_least else found <= goal)
        for found, goal, is_least in (
            (ratio, match.at_least, True),
            (cpu_ratio, match.cpu_at_most, False),
            (memory_ratio, match.memory_at_most, False),
        )
        if goal is not None
    ]
    is_met = None
    if kept and any(pair.ours.error for pair in pairs):
        is_met = False
    elif kept and ratio is not None:
        is_met = all(kept)
    if theirs is not None:
        theirs = replace(theirs, rate=min(theirs.rate, match.cap_per_second))
    return Row(
        scenario=scenario,
        case=match.case,
        peer=match.name,
        size_bytes=size_bytes,
        ours=ours,
        theirs=theirs,
        ratio=ratio,
        spread=_spread(ratios),
        cpu_ratio=cpu_ratio,
        cpu_spread=_spread(cpu_ratios),
        goal=goal_of(match),
        is_met=is_met,
        error=_errors(match, pairs),
    )


def unplayed(scenario: str, match: Match, error: str) -> Row:
    """Return the row of a match that could not run."""
    return Row(
        scenario=scenario,
        case=match.case,
        peer=match.name,
        size_bytes=0,
        goal=goal_of(match),
        is_met=None,
        error=error,
    )


def judge_promise(scenario: str, promise: Promise, pairs: Sequence[Pair]) -> Row:
    """Return the row of a promise, which is not kept if a sample of aioflux failed.

    The pairs that count are used, and for `memory` also the pair that warms up: a warm-up does not
    reduce the memory of a later process.
    """
    is_memory = promise.figure == "memory"
    counted = [pair for pair in pairs if is_memory or not pair.is_warm_up]
    results = _results(pair.ours for pair in counted)
    values = [_value(promise.figure, result) for result in results]
    value = None
    if values:
        takes_maximum = promise.figure in {"requests", "memory"}
        value = max(values) if takes_maximum else statistics.median(values)
    has_failed = any(pair.ours.error for pair in counted)
    return Row(
        scenario=scenario,
        case="memory above idle" if is_memory else promise.figure,
        peer="-",
        size_bytes=0,
        ours=median_of(results),
        figure=_figure(promise.figure, value) if value is not None else "-",
        goal=promised(promise),
        is_met=None if value is None else value <= promise.at_most and not has_failed,
    )


def _value(figure: str, result: Result) -> float:
    match figure:
        case "requests":
            return result.num_requests
        case "waiting":
            return result.waited_seconds / result.seconds
        case "memory":
            return result.peak_bytes - result.idle_bytes
        case _:
            return 1e3 / result.rate


def promised(promise: Promise) -> str:
    """Return the goal of a promise."""
    return f"<= {_figure(promise.figure, promise.at_most)}"


def _figure(name: str, value: float) -> str:
    if name == "memory":
        return f"{value / MIB:,.0f} MiB"
    return f"{value:.1%}" if name == "waiting" else f"{value:,.0f}"


def goal_of(match: Match) -> str:
    """Return the goals of the ratios of a match; empty if there are none."""
    goals = (
        ("", ">=", match.at_least),
        ("CPU ", "<=", match.cpu_at_most),
        ("memory ", "<=", match.memory_at_most),
    )
    return ", ".join(f"{word}{sign} {goal:g}x" for word, sign, goal in goals if goal is not None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _spread(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def _results(samples: Iterable[Sample]) -> list[Result]:
    return [sample.result for sample in samples if sample.result is not None]


def _errors(match: Match, pairs: Sequence[Pair]) -> str:
    words = []
    for who, errors in (
        (match.ours.work.peer, [pair.ours.error for pair in pairs if pair.ours.error]),
        (match.name, [pair.theirs.error for pair in pairs if pair.theirs.error]),
    ):
        if errors:
            words.append(f"{who} failed {len(errors)} of {len(pairs)} times: {errors[0]}")
    return "; ".join(words)
