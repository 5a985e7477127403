"""`perf cli`: its lines, and a run at toy size."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from perf.__main__ import main
from perf.cli import TOOLS, Row, Sample, line_of

if TYPE_CHECKING:
    from pathlib import Path

ROW = Row(name="row", action="list", goal=1.3)


def samples(**seconds: list[float] | str) -> list[Sample]:
    """Return the samples of each tool: the seconds of each round, or an error."""
    found = []
    for tool, values in seconds.items():
        error = values if isinstance(values, str) else ""
        for number, value in enumerate([9.0, 9.0] if isinstance(values, str) else values):
            found.append(Sample("row", tool, number, value, value / 2, error))
    return found


def test_a_line_has_medians_and_the_ratio_of_each_round_to_its_faster_peer() -> None:
    found = samples(aioflux=[50, 1, 2, 1], s5cmd=[50, 2, 3, 4], rclone=[50, 3, 2, 5])
    assert line_of(ROW, found) == (
        "| row | 1.00 s, CPU 0.50 s | 3.00 s, CPU 1.50 s | 3.00 s, CPU 1.50 s "
        "| 2.00x (1.00..4.00); >= 1.3x met |"
    )


def test_a_line_of_a_tool_that_fails_and_of_a_goal_that_is_missed() -> None:
    line = line_of(ROW, samples(aioflux=[1, 2], s5cmd="not installed", rclone=[1, 1]))
    assert "| not installed |" in line
    assert line.endswith("| 0.50x (0.50..0.50); >= 1.3x MISSED |")
    line = line_of(ROW, samples(aioflux="not there", s5cmd=[1, 1], rclone=[1, 1]))
    assert line.startswith("| row | not there | ")
    assert line.endswith("| - |")


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="SeaweedFS of PyPI")
def test_a_toy_run_checks_what_each_tool_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--num-keys", "1500", "--num-small", "200", "--large-bytes", "20000000")
    main(["cli", "--rounds", "1", *sizes, "--out", str(tmp_path)])
    [log] = tmp_path.glob("cli-*.jsonl")
    header, *lines = map(json.loads, log.read_text().splitlines())
    assert header["command"].startswith("python -m perf cli --rounds 1 --num-keys 1500")
    assert {(line["tool"], line["round"]) for line in lines} == {
        (tool, number) for tool in TOOLS for number in (0, 1)
    }
    found = [sample for sample in (Sample(**line) for line in lines) if sample.error]
    assert {sample.error for sample in found} <= {"not there", "not installed"}
    assert not [each for each in found if each.tool == "aioflux" and "sync" not in each.row]
    printed = capsys.readouterr().out
    assert "| list 1,500 objects |" in printed
    assert "| down 1 x 19 MiB |" in printed
    assert printed.count("x (") >= 7
