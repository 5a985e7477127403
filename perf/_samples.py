"""What was measured, and what it says: rates, ratios pair by pair, and goals met or missed.

Everything here is a function over samples; nothing measures.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from perf.scenarios import Match, MemoryGoal, Promise
    from perf.work import Work

__all__ = [
    "MIB",
    "Median",
    "Pair",
    "Result",
    "Row",
    "Sample",
    "judge",
    "judge_memory",
    "judge_promise",
    "median_of",
    "ratio_of",
    "unplayed",
]

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a contender's process tells of itself."""

    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    num_objects: int
    num_bytes: int
    idle_bytes: int
    peak_bytes: int
    num_requests: int = 0
    waited_seconds: float = 0.0
    stored_bytes: int = 0

    @classmethod
    def told(cls, line: Mapping[str, Any]) -> Result:
        """Take it out of the line that the process printed."""
        return cls(**{name: line[name] for name in cls.__dataclass_fields__ if name in line})

    @property
    def rate(self) -> float:
        """Objects per second."""
        return self.num_objects / self.seconds


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One turn of one contender."""

    work: Work
    result: Result | None = None
    """None where it failed."""
    error: str = ""
    """Why it failed; empty where it did not."""
    is_too_slow: bool = False
    """Whether it failed because it took too long."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two turns, ours and then theirs."""

    index: int
    """Counted from 0."""
    is_warm_up: bool
    """Whether it is kept, but counts for nothing."""
    ours: Sample
    theirs: Sample


@dataclass(frozen=True, kw_only=True)
class Median:
    """The middle of what one contender took, over the pairs that count."""

    rate: float
    """Objects per second."""
    cpu_us: float
    """CPU time per object, in microseconds."""
    server_cpu_us: float
    """The server's CPU time per object, in microseconds."""
    peak_bytes: int
    """Most memory that was resident in any pair."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a match, or a promise about memory."""

    scenario: str
    case: str
    peer: str
    size_bytes: int
    """Size of the object where rates are told in bytes; 0 where they are told in objects."""
    ours: Median | None = None
    theirs: Median | None = None
    """Its rate is at most the match's cap."""
    ratio: float | None = None
    """Median over the pairs."""
    spread: tuple[float, float] | None = None
    """The least and the greatest ratio of a pair."""
    held_bytes: int | None = None
    """The most memory that was held, where the promise is about memory."""
    figure: str = ""
    """What else is told of ours alone, in words; empty in other rows."""
    goal: str = ""
    """In words; empty where nothing is promised."""
    is_met: bool | None = None
    """None where nothing is promised, or where it cannot be said."""
    error: str = ""
    """What went wrong, and how often."""


def ratio_of(ours: Result, theirs: Result, cap_per_second: float) -> float:
    """Return our rate by theirs, or by the cap where that is less."""
    return ours.rate / min(theirs.rate, cap_per_second)


def median_of(results: Sequence[Result]) -> Median | None:
    """Return the middle of the results; None where there are none."""
    if not results:
        return None
    return Median(
        rate=statistics.median(result.rate for result in results),
        cpu_us=statistics.median(
            1e6 * result.cpu_seconds / result.num_objects for result in results
        ),
        server_cpu_us=statistics.median(
            1e6 * result.server_cpu_seconds / result.num_objects for result in results
        ),
        peak_bytes=max(result.peak_bytes for result in results),
    )


def judge(scenario: str, size_bytes: int, match: Match, pairs: Sequence[Pair]) -> Row:
    """Say what a match showed: ratios of the whole pairs, and every failure.

    A goal is met by the median ratio, and only where none of our samples failed. Where a peer gave
    no whole pair at all, nothing can be said.
    """
    counted = [pair for pair in pairs if not pair.is_warm_up]
    whole = [
        (pair.ours.result, pair.theirs.result)
        for pair in counted
        if pair.ours.result is not None and pair.theirs.result is not None
    ]
    ratios = [ratio_of(ours, theirs, match.cap_per_second) for ours, theirs in whole]
    ratio = statistics.median(ratios) if ratios else None
    is_met = None
    if match.at_least is not None:
        if any(pair.ours.error for pair in pairs):
            is_met = False
        elif ratio is not None:
            is_met = ratio >= match.at_least
    theirs = median_of(_results(pair.theirs for pair in counted))
    if theirs is not None:
        theirs = replace(theirs, rate=min(theirs.rate, match.cap_per_second))
    return Row(
        scenario=scenario,
        case=match.case,
        peer=match.name,
        size_bytes=size_bytes,
        ours=median_of(_results(pair.ours for pair in counted)),
        theirs=theirs,
        ratio=ratio,
        spread=(min(ratios), max(ratios)) if ratios else None,
        goal=_goal(match),
        is_met=is_met,
        error=_errors(match, pairs),
    )


def unplayed(scenario: str, match: Match, error: str) -> Row:
    """Say why a match could not be played at all."""
    return Row(
        scenario=scenario,
        case=match.case,
        peer=match.name,
        size_bytes=0,
        goal=_goal(match),
        is_met=None,
        error=error,
    )


def judge_memory(scenario: str, goal: MemoryGoal, pairs: Iterable[Pair]) -> Row:
    """Say whether the most that any of our samples held is within the limit.

    The pair that warms up counts like any other: memory has no reason to be better later.
    """
    results = _results(pair.ours for pair in pairs)
    held = [
        result.peak_bytes - (result.idle_bytes if goal.is_above_idle else 0) for result in results
    ]
    return Row(
        scenario=scenario,
        case="memory above idle" if goal.is_above_idle else "memory",
        peer="-",
        size_bytes=0,
        ours=median_of(results),
        held_bytes=max(held, default=None),
        goal=f"<= {goal.limit_bytes / MIB:,.0f} MiB",
        is_met=max(held) <= goal.limit_bytes if held else None,
    )


def judge_promise(scenario: str, promise: Promise, pairs: Iterable[Pair]) -> Row:
    """Say whether a figure of ours is what it must be, over the pairs that count.

    It is the greatest number of requests, or else the median. It is kept by none of ours that
    failed.
    """
    counted = [pair for pair in pairs if not pair.is_warm_up]
    results = _results(pair.ours for pair in counted)
    figures: dict[str, list[float]] = {
        "requests": [result.num_requests for result in results],
        "waiting": [result.waited_seconds / result.seconds for result in results],
        "stored": [result.stored_bytes / result.num_bytes for result in results],
        "read": [result.stored_bytes / result.num_bytes for result in results],
        "objects/s": [result.rate for result in results],
    }
    values = figures[promise.figure]
    value = None
    if values:
        value = max(values) if promise.figure == "requests" else statistics.median(values)
    is_kept = value is not None and promise.at_least <= value <= promise.at_most
    has_failed = any(pair.ours.error for pair in counted)
    word = partial(_figure, promise.figure)
    is_most = promise.at_most < math.inf
    return Row(
        scenario=scenario,
        case=promise.figure,
        peer="-",
        size_bytes=0,
        ours=median_of(results),
        figure=word(value) if value is not None else "-",
        goal=f"<= {word(promise.at_most)}" if is_most else f">= {word(promise.at_least)}",
        is_met=None if value is None else is_kept and not has_failed,
    )


def _figure(name: str, value: float) -> str:
    return f"{value:.1%}" if name in {"waiting", "stored", "read"} else f"{value:,.0f}"


def _goal(match: Match) -> str:
    return "" if match.at_least is None else f">= {match.at_least:g}x"


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
