"""Medians, ratios pair by pair, and goals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from perf._samples import (
    MIB,
    Pair,
    Result,
    Sample,
    judge,
    judge_memory,
    judge_promise,
    median_of,
    ratio_of,
    unplayed,
)
from perf.scenarios import Match, MemoryGoal, Promise, Side
from perf.servers import ServerSpec
from perf.work import Work


def work(peer: str) -> Work:
    return Work(peer=peer, operation="get_many", url="", size_bytes=10, num_objects=100)


def match(at_least: float | None = None, cap: float = math.inf, label: str = "") -> Match:
    ours, theirs = (Side(work=work(peer), server=ServerSpec()) for peer in ("aioflux", "slow"))
    return Match(ours=ours, theirs=theirs, at_least=at_least, cap_per_second=cap, label=label)


def result(rate: float, *, idle: int = 0, peak: int = 0, cpu: float = 0.0) -> Result:
    return Result(
        seconds=100 / rate,
        cpu_seconds=cpu,
        server_cpu_seconds=cpu / 2,
        num_objects=100,
        num_bytes=1000,
        idle_bytes=idle,
        peak_bytes=peak,
    )


def sample(of: Result | str, peer: str) -> Sample:
    if isinstance(of, str):
        return Sample(work=work(peer), error=of)
    return Sample(work=work(peer), result=of)


def pairs(*rates: tuple[float | str, float | str], warm_up: bool = True) -> list[Pair]:
    return [
        Pair(
            index=index,
            is_warm_up=warm_up and index == 0,
            ours=sample(ours if isinstance(ours, str) else result(ours), "aioflux"),
            theirs=sample(theirs if isinstance(theirs, str) else result(theirs), "slow"),
        )
        for index, (ours, theirs) in enumerate(rates)
    ]


def test_ratio_is_median_of_the_pairs_not_ratio_of_the_medians() -> None:
    row = judge("s", 0, match(), pairs((9, 1), (10, 10), (40, 20), (90, 10)))
    assert row.ratio == pytest.approx(2.0)  # of 1, 2 and 9; the medians' would be 40 / 10
    assert row.spread == pytest.approx((1.0, 9.0))


def test_pair_that_warms_up_counts_for_nothing() -> None:
    row = judge("s", 0, match(), pairs((1000, 1), (20, 10)))
    assert row.ratio == pytest.approx(2.0)
    assert row.ours is not None
    assert row.ours.rate == pytest.approx(20)


@pytest.mark.parametrize(
    ("ours", "at_least", "expected"),
    [(20, 2.0, True), (19.9, 2.0, False), (1, None, None)],
    ids=["reached", "missed", "nothing promised"],
)
def test_goal_is_met_from_the_ratio_on(
    ours: float, at_least: float | None, expected: bool | None
) -> None:
    assert judge("s", 0, match(at_least), pairs((1, 1), (ours, 10))).is_met is expected


@pytest.mark.parametrize(
    ("cap", "expected", "shown"),
    [(50.0, 0.9, 50), (200.0, 0.45, 100)],
    ids=["cap is less", "rate is less"],
)
def test_bound_is_the_lesser_of_cap_and_measured_rate(
    cap: float, expected: float, shown: float
) -> None:
    row = judge("s", 0, match(0.9, cap, label="bound"), pairs((1, 1), (45, 100)))
    assert row.peer == "bound"
    assert row.ratio == pytest.approx(expected)
    assert row.is_met is (expected >= 0.9)
    assert row.theirs is not None
    assert row.theirs.rate == pytest.approx(shown)


def test_ratio_of_takes_the_cap_into_account() -> None:
    assert ratio_of(result(30), result(60), math.inf) == pytest.approx(0.5)
    assert ratio_of(result(30), result(60), 30.0) == pytest.approx(1.0)


def beside(*cpu: tuple[float, float], peaks: tuple[int, int] = (1, 1)) -> list[Pair]:
    return [
        Pair(
            index=index,
            is_warm_up=False,
            ours=sample(result(20, cpu=ours, peak=peaks[0]), "aioflux"),
            theirs=sample(result(10, cpu=theirs, peak=peaks[1]), "slow"),
        )
        for index, (ours, theirs) in enumerate(cpu)
    ]


@pytest.mark.parametrize(
    ("at_least", "cpu_at_most", "expected"),
    [(None, 0.5, True), (None, 0.49, False), (2.0, 0.5, True), (2.1, 0.5, False)],
)
def test_cpu_time_is_a_goal_too(at_least: float | None, cpu_at_most: float, expected: bool) -> None:
    limited = replace(match(at_least), cpu_at_most=cpu_at_most)
    row = judge("s", 0, limited, beside((1, 4), (2, 4), (4, 4)))
    assert row.cpu_ratio == pytest.approx(0.5)
    assert row.cpu_spread == pytest.approx((0.25, 1.0))
    assert row.is_met is expected
    assert row.goal.endswith(f"CPU <= {cpu_at_most:g}x")


@pytest.mark.parametrize(("peaks", "expected"), [((10, 10), True), ((11, 10), False)])
def test_memory_is_a_goal_too(peaks: tuple[int, int], expected: bool) -> None:
    limited = replace(match(), memory_at_most=1.0)
    assert judge("s", 0, limited, beside((1, 1), peaks=peaks)).is_met is expected


def test_peer_without_cpu_time_has_no_cpu_ratio() -> None:
    row = judge("s", 0, replace(match(), cpu_at_most=1.0), beside((1, 0)))
    assert (row.cpu_ratio, row.is_met) == (None, False)


def test_peer_that_fails_leaves_the_goal_open_and_says_why() -> None:
    row = judge("s", 0, match(2.0), pairs((10, "ImportError: no"), (10, "ImportError: no")))
    assert (row.ratio, row.spread, row.is_met) == (None, None, None)
    assert row.error == "slow failed 2 of 2 times: ImportError: no"
    assert row.ours is not None


def test_one_failure_of_ours_misses_the_goal() -> None:
    row = judge("s", 0, match(1.0), pairs((10, 1), (10, 1), ("lost", 1), (10, 1)))
    assert row.ratio == pytest.approx(10)
    assert row.is_met is False
    assert row.error == "aioflux failed 1 of 4 times: lost"


def test_pairs_that_are_not_whole_have_no_ratio() -> None:
    row = judge("s", 0, match(), pairs((1, 1), (10, 1), (10, "reset"), (30, 3)))
    assert row.ratio == pytest.approx(10)
    assert row.error == "slow failed 1 of 4 times: reset"


def test_median_of_nothing_is_nothing() -> None:
    assert median_of([]) is None


def test_median_reports_cpu_per_object_and_the_highest_peak() -> None:
    middle = median_of([result(1, cpu=cpu, peak=peak) for cpu, peak in ((1, 7), (2, 9), (6, 8))])
    assert middle is not None
    assert middle.cpu_us == pytest.approx(20_000)
    assert middle.server_cpu_us == pytest.approx(10_000)
    assert middle.peak_bytes == 9


@pytest.mark.parametrize(
    ("is_above_idle", "peak", "expected"),
    [(True, 150, True), (True, 151, False), (False, 100, True), (False, 101, False)],
)
def test_memory_goal_is_about_the_worst_sample(
    is_above_idle: bool, peak: int, expected: bool
) -> None:
    goal = MemoryGoal(limit_bytes=100 * MIB, is_above_idle=is_above_idle)
    held = [
        Pair(
            index=index,
            is_warm_up=False,
            ours=sample(result(1, idle=50 * MIB, peak=peak_mib * MIB), "aioflux"),
            theirs=sample(result(1, peak=10**12), "slow"),
        )
        for index, peak_mib in enumerate((60, peak, 60))
    ]
    row = judge_memory("s", goal, held)
    assert row.is_met is expected
    assert row.held_bytes == (peak - 50 * is_above_idle) * MIB
    assert row.goal == "<= 100 MiB"
    assert row.case == ("memory above idle" if is_above_idle else "memory")


def test_memory_goal_without_samples_is_open() -> None:
    goal = MemoryGoal(limit_bytes=1, is_above_idle=False)
    assert judge_memory("s", goal, pairs(("no", 1))).is_met is None


def test_match_that_was_not_played_says_why() -> None:
    row = unplayed("s", match(2.0), "OSError: no room")
    assert (row.goal, row.is_met, row.error) == (">= 2x", None, "OSError: no room")


def told(rate: float, **figures: float) -> Pair:
    ours = replace(result(rate), **figures)  # type: ignore[arg-type]
    return Pair(
        index=1, is_warm_up=False, ours=sample(ours, "aioflux"), theirs=sample(result(1.0), "peer")
    )


@pytest.mark.parametrize(
    ("promise", "pairs", "figure", "is_met"),
    [
        (Promise(figure="requests", at_most=1), [told(1, num_requests=1)] * 2, "1", True),
        (
            Promise(figure="requests", at_most=1),
            [told(1, num_requests=1), told(1, num_requests=2)],
            "2",
            False,
        ),
        (
            Promise(figure="waiting", at_most=0.05),
            [told(100, waited_seconds=0.01), told(100, waited_seconds=9.0)],
            "",
            False,
        ),
        (
            Promise(figure="stored", at_most=0.69),
            [told(1, num_bytes=100, stored_bytes=67)] * 2,
            "67.0%",
            True,
        ),
        (Promise(figure="objects/s", at_least=10), [told(10), told(12), told(4)], "10", True),
        (Promise(figure="objects/s", at_least=11), [told(10), told(12), told(4)], "10", False),
        (Promise(figure="objects/s", at_least=11), [], "-", None),
        (Promise(figure="ms", at_most=60), [told(20), told(10), told(40)], "50", True),
        (Promise(figure="ms", at_most=40), [told(20), told(10), told(40)], "50", False),
    ],
    ids=[
        "most is kept",
        "most is broken",
        "share",
        "stored",
        "least is kept",
        "least is broken",
        "none",
        "milliseconds are kept",
        "milliseconds are broken",
    ],
)
def test_promise_is_about_ours_alone(
    promise: Promise, pairs: list[Pair], figure: str, is_met: bool | None
) -> None:
    row = judge_promise("list-10", promise, pairs)
    assert row.is_met is is_met
    assert not figure or row.figure == figure


def test_promise_is_not_kept_where_one_of_ours_failed() -> None:
    failed = Pair(
        index=2,
        is_warm_up=False,
        ours=sample("broke", "aioflux"),
        theirs=sample(result(1.0), "peer"),
    )
    promise = Promise(figure="requests", at_most=1)
    row = judge_promise("list-10", promise, [told(1.0, num_requests=1), failed])
    assert row.is_met is False


def test_requests_of_the_pair_that_warms_up_do_not_count() -> None:
    early = replace(told(1.0, num_requests=5), is_warm_up=True)
    promise = Promise(figure="requests", at_most=0)
    assert judge_promise("epoch", promise, [early, told(1.0)]).is_met
