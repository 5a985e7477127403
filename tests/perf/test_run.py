"""Every scenario from the command line to its files, at toy size."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perf import _plot
from perf.__main__ import Run, main, parser, play_match
from perf.scenarios import SCENARIOS
from perf.servers._nginx import missing
from tests.patience import wait_until

if TYPE_CHECKING:
    from perf.servers import Server, ServerSpec

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.more]

PEERS = {
    "get-1KiB": ("google",),
    "get-100KiB": ("gcsfs", "requests"),
    "get-100KiB-tls": ("obstore",),
    "get-1MiB": ("transfer_manager",),
    "object-1GiB": ("obstore",),
    "object-1GiB-tls": ("gcloud_aio",),
    "get-into": ("obstore",),
    "latency": ("aioflux", "aiohttp"),
    "paced": ("aioflux",),
    "put-1GiB": ("gcloud_aio",),
    "put-many": ("obstore",),
    "sync": ("aioflux",),
    "startup": ("obstore", "google"),
    "faults": ("aioflux",),
    "list-10": ("google",),
    "list-10k": ("gcsfs",),
    "list-1M": ("obstore",),
    "parse-1M": ("google",),
    "parse-1M-http": ("google",),
    "loader-100KiB": ("direct",),
    "epoch-cached": ("aioflux_data",),
    "epoch-wait": ("aioflux_data",),
    "epoch-wait-inline": ("memory_data",),
    "epoch-wait-threads": ("aioflux_data",),
    "epoch-images": ("aioflux_data",),
    "checkpoint-save-76MB": ("gcsfs_checkpoint",),
    "ratio-get-1KiB": ("obstore_crc32c", "raw"),
    "ratio-get-range-1MiB": ("obstore",),
    "ratio-get-1GiB-tls": ("obstore_ranges",),
    "ratio-load-1GiB-tls": ("obstore_ranges",),
    "ratio-save-async-first": ("memory_copy",),
    "opening-tls": ("obstore",),
    "gets-1M": ("aioflux",),
    "torch-load-298MB-tls": ("obstore_torch",),
    "torch-save-298MB": ("obstore_torch",),
    "mlperf-unet3d": ("obstore_data",),
    "mlperf-resnet50": ("gcsfs_data",),
    "ray-write": ("gcsfs_ray",),
    "ray-train": ("gcsfs_ray",),
    "map-single": ("aioflux_sync",),
    "save-small": ("gcsfs_steps",),
    "load-small": ("gcsfs_steps",),
}
"""Against whom; each peer somewhere, and few in all. The other epochs differ in their objects."""
ON_NGINX = {
    "get-1KiB": ("obstore", "wrk") if shutil.which("wrk") else ("obstore",),
    "get-100KiB-tls": ("gcloud_aio",),
    "latency": ("aioflux",),
    "put-1GiB": ("obstore",),
    "list-10k": ("obstore",),
    "checkpoint-load-76MB": ("google_checkpoint",),
    "ratio-get-16MiB-tls": ("obstore", "raw"),
    "list-10M": ("aioflux", "aioflux_map"),
    "mlperf-resnet50": ("aioflux_data", "obstore_data"),
    "ray-read": ("download_ray",),
    "map-single": ("aioflux_sync",),
    "ratio-get-range-8MiB": ("obstore",),
}


def run(out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Return the exit status, the JSON lines and the Markdown of a run."""
    status = main([*arguments, "--toy", "--pairs", "1", "--out", str(out)])
    (lines,) = out.glob("*.jsonl")
    (table,) = out.glob("*.md")
    return status, [json.loads(line) for line in lines.read_text().splitlines()], table.read_text()


def check(out: Path, name: str, lines: list[dict[str, Any]], table: str) -> None:
    """Check that every sample moved all its bytes, and that each is told."""
    assert [line["error"] for line in lines] == [""] * len(lines)
    assert [line["side"] for line in lines] == ["ours", "theirs"] * (len(lines) // 2)
    for line in lines:
        work, result = line["work"], line["result"]
        if work["utilization"]:
            assert result["accelerators"] > 0 or result["utilization"] < work["utilization"]
        else:
            assert result["num_bytes"] == result["num_objects"] * work["size_bytes"]
            assert result["num_objects"] == work["num_objects"] or work["peer"] == "wrk"
        assert result["seconds"] > 0
        assert 0 < result["idle_bytes"] <= result["peak_bytes"]
    assert sum(row.startswith(f"| {name}") for row in table.splitlines()) >= len(lines) // 2
    memory = [row for row in table.splitlines() if row.startswith(f"| {name} (memory")]
    assert len(memory) == (SCENARIOS[name].memory_goal() is not None)
    assert all(" MiB | met |" in row for row in memory)
    promises = SCENARIOS[name].promises()
    rows = [row for row in table.splitlines() if row.split("|")[2:5] == [" - ", " - ", " - "]]
    assert len(rows) == len(memory) + len(promises)
    assert len(list(out.glob(f"*-{name}.png"))) == _plot.is_possible()


@pytest.mark.parametrize("name", PEERS)
def test_scenario_runs_on_the_embedded_server(name: str, tmp_path: Path) -> None:
    status, lines, table = run(tmp_path, name, "--server", "embedded", "--peers", *PEERS[name])
    check(tmp_path, name, lines, table)
    assert status == 0
    assert {line["work"]["peer"] for line in lines} >= set(PEERS[name])


@pytest.mark.parametrize("name", ON_NGINX)
def test_scenario_runs_on_nginx(name: str, tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    status, lines, table = run(tmp_path, name, "--peers", *ON_NGINX[name])
    check(tmp_path, name, lines, table)
    assert status == 0
    assert {line["work"]["peer"] for line in lines} >= set(ON_NGINX[name])


def test_peer_that_cannot_run_is_a_row_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module that is found, and cannot be imported.
    monkeypatch.setattr("perf.__main__.known_peers", lambda: ["nosuch", "obstore"])
    status, lines, table = run(
        tmp_path, "get-1KiB", "--server", "embedded", "--peers", "nosuch", "obstore"
    )
    assert status == 0
    assert [bool(line["error"]) for line in lines] == [False, True, False, False]
    assert "No module named 'perf.peers.nosuch'" in table
    assert "! nosuch failed 1 of 1 times: ModuleNotFoundError" in capsys.readouterr().out


def test_results_of_record_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.__main__.RESULTS", tmp_path / "results")
    for name in ("sync", "get-1KiB"):
        arguments = (name, "--server", "embedded", "--peers", "aioflux", "obstore")
        run(tmp_path / name, *arguments, "--keep", "all")
    lines = (tmp_path / "results" / "all.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert ["command" in line for line in found].count(True) == 2
    assert {line.get("scenario") for line in found} == {None, "sync", "get-1KiB"}
    assert (tmp_path / "results" / "all.md").read_text().count("| scenario |") == 2


def test_server_that_does_not_start_is_a_row_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def servers(spec: ServerSpec) -> Server:
        raise OSError(f"no room for {spec.kind}")

    args = parser().parse_args(["--out", str(tmp_path)])
    run = Run(args=args, name="run", circumstances={})
    scenario = SCENARIOS["get-1KiB"]
    assert play_match(run, scenario, scenario.matches()[0], servers) == []
    assert [row.error for row in run.rows] == ["OSError: no room for nginx"]
    assert run.has_failed
    assert "! OSError: no room for nginx" in capsys.readouterr().out


def test_interrupted_run_keeps_its_samples_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf", "get-1KiB", "--server", "embedded", "--toy"]
    with subprocess.Popen(
        [*command, "--peers", "obstore", "--pairs", "1000", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        # A shell has its background jobs ignore it, and so would this one's children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    ) as process:
        wait_until(
            lambda: (
                process.poll() is not None
                or any(log.read_text() for log in tmp_path.glob("*.jsonl"))
            )
        )
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert "# interrupted" in process.stdout.read()
        assert process.wait() == 1
    (log,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["error"] for line in lines] == [""] * len(lines)
    (table,) = tmp_path.glob("*.md")
    assert table.read_text().endswith("* interrupted\n")
    pids = {pid for line in lines for pid in line["work"]["server_pids"]}
    assert pids
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_scenario_without_a_match_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get-1KiB", "--peers", "aioflux", "--out", str(tmp_path)]) == 0
    assert "get-1KiB has no match against aioflux" in capsys.readouterr().out


def test_wrong_name_ends_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["nosuch"])
    assert caught.value.code == 2
    assert "unknown scenario 'nosuch'; there are get-1KiB" in capsys.readouterr().err


def test_list_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "get-100KiB-tls" in capsys.readouterr().out
