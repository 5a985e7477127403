"""The cost ledger: every variant does the same reads, and the tables are what was measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from perf._ledger_steps import STEPS, Reads, added, measure
from perf.ledger import TOY, growth, num_keys, steps_table
from perf.servers import BUCKET, Server, ServerSpec, open_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 5000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(ServerSpec(objects=((SIZE, 3),))) as server:
        yield server


def reads(server: Server, **changes: int) -> Reads:
    few = {"size_bytes": SIZE, "num_objects": 12, "num_keys": 3, "in_flight": 4, "num_rounds": 2}
    return Reads(url=server.url, bucket=BUCKET, **{**few, **changes})


def test_every_step_is_measured_in_every_round(server: Server) -> None:
    taken = asyncio.run(measure(reads(server)))
    assert list(taken) == list(STEPS)
    assert {len(values) for values in taken.values()} == {2}


def test_a_turn_that_fails_ends_the_run(server: Server) -> None:
    with pytest.raises(ValueError, match="404"):
        asyncio.run(measure(reads(server, num_keys=4)))


def test_a_step_costs_what_it_adds_to_the_one_before() -> None:
    taken = {"floor": [1e-6, 5e-6], "kernel": [3e-6, 7e-6], "parse": [4e-6, 8e-6]}
    assert added(taken) == pytest.approx({"kernel": 2e-6, "parse": 1e-6})
    lines = steps_table(taken).splitlines()
    assert lines[2].endswith("|  | 3.0 |")
    assert lines[3].endswith("| 2.0 | 5.0 |")


def test_a_growth_reports_medians_of_each_point() -> None:
    def row(cpu: float, peak: int) -> dict[str, object]:
        return {
            "work": {"size_bytes": 1024, "in_flight": 64},
            "num_objects": 1000,
            "num_bytes": 1024000,
            "seconds": 0.5,
            "cpu_seconds": cpu,
            "server_cpu_seconds": 0.01,
            "peak_bytes": peak << 20,
            "idle_bytes": 40 << 20,
        }

    text = growth("total", [[row(0.1, 50), row(0.3, 52), row(0.2, 51)]])
    assert text.splitlines()[2] == "| 1,000 | 200.0 | 10.0 | 2,000 | 0.00 | 51 | 11 |"


def test_there_are_fewer_keys_of_large_objects() -> None:
    assert num_keys(1024, TOY) == 64
    assert num_keys(TOY.max_bytes, TOY) == 1


@pytest.mark.more
def test_the_command_prints_every_table_and_keeps_samples(tmp_path: Path) -> None:
    out = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-m", "perf.ledger", "--toy", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    for words in ("consumer", "object |", "in flight |", "objects of 1 KiB |"):
        assert words in done.stdout
    parts = [json.loads(line)["part"] for line in out.read_text().splitlines()]
    assert parts == ["steps", "size", "in-flight", "total"]
