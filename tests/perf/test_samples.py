"""Medians, ratios pair by pair, goals, and the tables that are made of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from perf._report import HEADINGS, cells, lines_of, terminal_heading, terminal_row
from perf._samples import MIB, Pair, Result, Sample, judge, judge_promise, ratio_of, unplayed
from perf.ratios import tables
from perf.scenarios import SCENARIOS, Match, Promise, Side
from perf.servers import ServerSpec
from perf.work import Work


def work(peer: str) -> Work:
    return Work(peer=peer, operation="get_many", size_bytes=10, num_objects=100)


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
        num_requests=int(rate),
        waited_seconds=10 / rate,
    )


def sample(of: Result | float | str, peer: str) -> Sample:
    if isinstance(of, str):
        return Sample(work=work(peer), error=of)
    return Sample(work=work(peer), result=of if isinstance(of, Result) else result(of))


def pairs(*sides: tuple[Result | float | str, Result | float | str]) -> list[Pair]:
    """Return pairs of rates, results or errors; the first one warms up."""
    return [
        Pair(
            index=index,
            is_warm_up=index == 0,
            ours=sample(ours, "aioflux"),
            theirs=sample(theirs, "slow"),
        )
        for index, (ours, theirs) in enumerate(((1000, 1), *sides))
    ]


def test_ratio_is_the_median_of_the_pairs_without_the_warm_up() -> None:
    row = judge("s", 0, match(), pairs((10, 10), (40, 20), (90, 10)))
    assert row.ratio == pytest.approx(2.0)  # of 1, 2 and 9; the medians' would be 40 / 10
    assert row.spread == pytest.approx((1.0, 9.0))
    assert row.ours is not None
    assert row.ours.rate == pytest.approx(40)


@pytest.mark.parametrize(
    ("ours", "at_least", "expected"),
    [(20, 2.0, True), (19.9, 2.0, False), (1, None, None), ("no", 2.0, False)],
)
def test_goal_is_met_from_the_ratio_on(
    ours: float | str, at_least: float | None, expected: bool | None
) -> None:
    assert judge("s", 0, match(at_least), pairs((ours, 10))).is_met is expected


def test_failures_are_counted_and_the_others_go_on() -> None:
    row = judge("s", 0, match(1.0), pairs((20, 10), (20, "broken"), (30, 10)))
    assert (row.ratio, row.is_met) == (pytest.approx(2.5), True)
    assert row.error == "slow failed 1 of 4 times: broken"


def test_a_cap_lowers_the_rate_of_the_other_side() -> None:
    assert ratio_of(result(20), result(100), cap_per_second=40) == pytest.approx(0.5)
    row = judge("s", 0, match(cap=40), pairs((20, 100)))
    assert row.theirs is not None
    assert row.theirs.rate == 40


def test_all_goals_of_a_match_are_needed() -> None:
    one = replace(match(1.0), cpu_at_most=0.5, memory_at_most=1.0)
    ours, theirs = result(20, cpu=1, peak=5), result(10, cpu=2, peak=5)
    row = judge("s", 0, one, pairs((ours, theirs)))
    assert (row.cpu_ratio, row.is_met) == (pytest.approx(0.5), True)
    assert row.goal == ">= 1x, CPU <= 0.5x, memory <= 1x"
    assert not judge("s", 0, one, pairs((replace(ours, peak_bytes=6), theirs))).is_met
    assert not judge("s", 0, one, pairs((replace(ours, cpu_seconds=1.1), theirs))).is_met


@pytest.mark.parametrize(
    ("promise", "figure", "is_met"),
    [
        (Promise(figure="requests", at_most=30), "40", False),
        (Promise(figure="waiting", at_most=0.1), "10.0%", True),
        (Promise(figure="ms", at_most=50), "42", True),
        (Promise(figure="memory", at_most=3 * MIB), "2 MiB", True),
    ],
)
def test_promises_are_of_ours_alone(promise: Promise, figure: str, is_met: bool) -> None:
    played = pairs(*((result(rate, idle=MIB, peak=3 * MIB), 1.0) for rate in (20, 24, 40)))
    row = judge_promise("s", promise, played)
    assert (row.figure, row.is_met, row.peer) == (figure, is_met, "-")
    assert judge_promise("s", promise, []).is_met is None


def test_a_row_has_everything_of_both_sides() -> None:
    row = judge("s", MIB, match(3.0), pairs((result(20, cpu=1e-3, peak=MIB), result(10, cpu=2e-3))))
    assert dict(zip(HEADINGS, cells(row), strict=True)) == {
        "scenario": "s",
        "against": "slow",
        "ours/s": "0.02 GB",
        "peer/s": "0.01 GB",
        "ratio (spread)": "2.00x (2.00..2.00)",
        "goal": ">= 3x",
        "met": "MISSED",
        "CPU us": "10 / 20",
        "CPU ratio": "0.50x (0.50..0.50)",
        "server us": "5.0 / 10",
        "peak MiB": "1 / 0",
    }
    assert terminal_heading().index("goal") + 4 == terminal_row(row).index(">= 3x") + 5


def test_a_match_that_could_not_run_is_a_row_with_its_error() -> None:
    row = unplayed("s", match(2.0, label="wrk"), "OSError: no")
    assert cells(row)[:7] == ("s", "wrk", "-", "-", "-", ">= 2x", "?")
    assert terminal_row(row).endswith("\n    ! OSError: no")


def test_tables_are_made_from_the_lines_of_a_run() -> None:
    lines = [json.dumps({"command": "python -m perf ratios"})]
    for name in ("ratio-get-1KiB", "ratio-put-1GiB"):
        for one in SCENARIOS[name].matches()[:2]:
            lines += lines_of(SCENARIOS[name], one, pairs((20, 10))[1], [])
    reads, others = tables([json.loads(line) for line in lines]).split("\n\n")
    assert [row.split(" | ")[0] for row in reads.splitlines()[2:]] == ["| `ratio-get-1KiB`"]
    assert "| obstore_crc32c | aioflux_unverified |" in reads
    assert "2.00x (2.00..2.00); >= 3x, CPU <= 0.25x MISSED" in reads
    row, fair = others.splitlines()[2:]
    assert row.startswith("| `ratio-put-1GiB` | obstore | ")
    assert fair.startswith("| `ratio-put-1GiB` | obstore_crc32c | ")
