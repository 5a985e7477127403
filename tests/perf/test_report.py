"""The table, the JSON lines, the picture, and the circumstances."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from perf import _machine, _plot
from perf._report import (
    HEADINGS,
    cells,
    lines_of,
    markdown,
    record_of,
    terminal_heading,
    terminal_row,
)
from perf._samples import MIB, Median, Pair, Result, Row, Sample
from perf.ratios import main as ratios_main
from perf.ratios import tables
from perf.scenarios import SCENARIOS

if TYPE_CHECKING:
    from pathlib import Path

    from perf.scenarios import Match

MEDIAN = Median(rate=1234.5, cpu_us=56.4, server_cpu_us=7.8, peak_bytes=90 * MIB)
SLOWER = Median(rate=617.25, cpu_us=112.6, server_cpu_us=8.2, peak_bytes=45 * MIB)
ROW = Row(
    scenario="get-1KiB",
    case="",
    peer="obstore",
    size_bytes=0,
    ours=MEDIAN,
    theirs=SLOWER,
    ratio=2.0,
    spread=(1.5, 2.25),
    cpu_ratio=0.5,
    cpu_spread=(0.4, 0.625),
    goal=">= 2.5x",
    is_met=False,
)
FAILED = Row(
    scenario="latency",
    case="64 in flight",
    peer="wrk",
    size_bytes=0,
    goal=">= 0.5x",
    error="wrk failed 1 of 1 times: wrk is missing",
)


def test_row_of_a_figure_reports_it_where_ratios_stand() -> None:
    row = Row(
        scenario="list-10",
        case="requests",
        peer="-",
        size_bytes=0,
        figure="1",
        goal="<= 1",
        is_met=True,
    )
    assert cells(row)[:7] == ("list-10 (requests)", "-", "-", "-", "1", "<= 1", "met")


def test_row_reports_everything_of_both_sides() -> None:
    assert dict(zip(HEADINGS, cells(ROW), strict=True)) == {
        "scenario": "get-1KiB",
        "against": "obstore",
        "ours/s": "1,234",
        "peer/s": "617",
        "ratio (spread)": "2.00x (1.50..2.25)",
        "goal": ">= 2.5x",
        "met": "MISSED",
        "CPU us/object, ours / peer": "56 / 113",
        "CPU ratio (spread)": "0.50x (0.40..0.62)",
        "server CPU us, ours / peer": "7.8 / 8.2",
        "peak MiB, ours / peer": "90 / 45",
    }


def test_large_objects_are_reported_in_bytes_per_second() -> None:
    row = Row(
        scenario="object-1GiB",
        case="",
        peer="obstore",
        size_bytes=1 << 30,
        ours=Median(rate=2.0, cpu_us=1_432_214, server_cpu_us=1, peak_bytes=1),
    )
    assert cells(row)[2:4] == ("2.15 GB", "-")
    assert cells(row)[7] == "1,432k / -"


def test_memory_is_reported_instead_of_a_ratio() -> None:
    row = Row(
        scenario="get-into",
        case="memory above idle",
        peer="-",
        size_bytes=0,
        ours=MEDIAN,
        held_bytes=1056 * MIB,
        goal="<= 1,056 MiB",
        is_met=True,
    )
    held = ("get-into (memory above idle)", "-", "-", "-", "1,056 MiB", "<= 1,056 MiB", "met")
    assert cells(row) == (*held, "-", "-", "-", "-")


def test_failed_peer_is_a_row_with_its_error() -> None:
    assert cells(FAILED)[:7] == (
        "latency (64 in flight)",
        "wrk",
        "-",
        "-",
        "-",
        ">= 0.5x",
        "?",
    )
    assert terminal_row(FAILED).endswith("\n    ! wrk failed 1 of 1 times: wrk is missing")


def test_terminal_columns_stand_under_their_headings() -> None:
    assert terminal_heading().index("goal") + 4 == terminal_row(ROW).index(">= 2.5x") + 7


def test_markdown_is_a_table_with_command_machine_errors_and_notes() -> None:
    text = markdown([ROW, FAILED], command="python -m perf", about="A machine.", notes=["A note."])
    lines = text.splitlines()
    assert lines[0] == "`python -m perf`"
    assert lines[2] == "A machine."
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(HEADINGS) + 1}
    assert len(table) == 4
    assert "* latency, wrk: wrk failed 1 of 1 times: wrk is missing" in lines
    assert lines[-1] == "* A note."


def pair(match: Match, index: int, *, is_warm_up: bool = False, fails: bool = False) -> Pair:
    result = Result(
        seconds=1.0 + index / 10,
        cpu_seconds=1.0,
        server_cpu_seconds=0.5,
        num_objects=10,
        num_bytes=100,
        idle_bytes=1,
        peak_bytes=2,
    )
    theirs = Sample(work=match.theirs.work, error="no") if fails else None
    return Pair(
        index=index,
        is_warm_up=is_warm_up,
        ours=Sample(work=match.ours.work, result=result),
        theirs=theirs or Sample(work=match.theirs.work, result=result),
    )


def test_json_line_of_each_sample_says_all_that_is_known() -> None:
    scenario = SCENARIOS["latency"]
    match = scenario.matches()[0]
    circumstances = _machine.describe()
    lines = [
        json.loads(line)
        for line in lines_of(scenario, match, pair(match, 3, fails=True), ["note"], circumstances)
    ]
    assert [line["side"] for line in lines] == ["ours", "theirs"]
    ours, theirs = lines
    assert (ours["scenario"], ours["case"], ours["match"]) == ("latency", "64 in flight", "bound")
    assert (ours["pair"], ours["is_warm_up"], ours["error"]) == (3, False, "")
    assert ours["parameters"]["latency_seconds"] == 0.03
    assert ours["result"]["num_objects"] == 10
    assert ours["work"] == {**asdict(match.ours.work), "server_pids": []}
    assert ours["server"]["latency_seconds"] == 0.03
    assert (theirs["result"], theirs["error"]) == (None, "no")
    assert {"versions", "machine", "commit", "is_dirty", "time", "server_notes"} <= set(ours)
    assert {"aioflux", "python", "obstore", "uvloop", "nginx", "OpenSSL"} <= set(ours["versions"])


def test_record_has_the_figures_of_each_sample_and_the_machine_once() -> None:
    (match, *_) = SCENARIOS["get-1KiB"].matches()
    full = list(lines_of(SCENARIOS["get-1KiB"], match, pair(match, 1), [], {"commit": "abc"}))
    first, *samples = map(json.loads, record_of(full, "python -m perf", {"commit": "abc"}))
    assert first == {"command": "python -m perf", "commit": "abc"}
    whole = [json.loads(line) for line in full]
    assert [sample["result"] for sample in samples] == [line["result"] for line in whole]
    assert not any({"work", "parameters", "commit"} & set(sample) for sample in samples)


def test_tables_of_the_ratios_are_made_from_their_record() -> None:
    lines: list[str] = []
    for name in ("ratio-get-1KiB", "ratio-put-1GiB"):
        for match in SCENARIOS[name].matches()[:2]:
            one = pair(match, 1)
            lines += lines_of(SCENARIOS[name], match, one, [], {})
    first, *samples = map(json.loads, record_of(lines, "python -m perf ratios", {}))
    assert len(samples) == 8
    reads, others = tables([first, *samples]).split("\n\n")
    assert [row.split(" | ")[0] for row in reads.splitlines()[2:]] == ["| `ratio-get-1KiB`"]
    assert "| obstore_crc32c | aioflux_unverified |" in reads
    assert ">= 3x, CPU <= 0.25x MISSED" in reads
    row, fair = others.splitlines()[2:]
    assert row.startswith("| `ratio-put-1GiB` | obstore | ")
    assert fair.startswith("| `ratio-put-1GiB` | obstore_crc32c | ")
    assert ">= 1.2x, memory <= 1x" in row


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.jsonl", "cannot read"), ("table.md", "has no JSON lines")],
)
def test_tables_of_an_unusable_file_end_with_one_line(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.md").write_text("| command |\n")
    with pytest.raises(SystemExit) as exited:
        ratios_main([str(tmp_path / name)])
    assert exited.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("perf.ratios: error: ")
    assert message in last
    assert name in last


def test_summary_names_machine_python_and_peers() -> None:
    text = _machine.summary(_machine.describe())
    assert "cores" in text
    assert "Python 3." in text
    assert "obstore " in text


@pytest.mark.skipif(not _plot.is_possible(), reason="matplotlib is missing")
@pytest.mark.parametrize("name", ["latency", "object-1GiB"])
def test_picture_is_drawn_even_where_a_peer_failed(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    played = [
        (match, [pair(match, index, is_warm_up=not index, fails=at == 1) for index in range(4)])
        for at, match in enumerate(scenario.matches()[:3])
    ]
    played.append((scenario.matches()[-1], []))
    target = tmp_path / "picture.png"
    _plot.plot(scenario, played, target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_points_are_spread_evenly() -> None:
    assert _plot.places(1) == [0.5]
    assert _plot.places(3) == [0.0, 0.5, 1.0]
    assert not any(math.isnan(place) for place in _plot.places(2))
