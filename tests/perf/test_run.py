"""Scenarios from the command line to their lines, at toy size; failures are rows."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from perf.__main__ import Run, main, parser, play_match
from perf.scenarios import SCENARIOS

if TYPE_CHECKING:
    from pathlib import Path

    from perf.servers import Server, ServerSpec

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.more]

PEERS = {
    "get-1KiB": ("google", "gcloud_aio", "gcsfs"),
    "get-1MiB": ("transfer_manager",),
    "get-into": ("obstore", "gcloud_aio"),
    "put-1GiB": ("gcloud_aio", "obstore", "transfer_manager"),
    "put-many": ("obstore", "gcloud_aio"),
    "object-1GiB-tls": ("obstore", "gcloud_aio", "transfer_manager"),
    "startup": ("obstore", "google", "gcsfs"),
    "faults": ("aioflux",),
    "list-1M": ("google",),
    "loader-100KiB": ("direct",),
    "epoch-own": ("aioflux_data",),
    "epoch-cached": ("aioflux_data",),
    "epoch-wait-threads": ("memory_data",),
    "epoch-images": ("aioflux_data",),
    "checkpoint-async-stage": ("memory_copy", "stock_async"),
    "checkpoint-async-train": ("aioflux_async",),
    "torch-load-298MB": ("gcsfs_checkpoint", "obstore_torch"),
    "torch-save-298MB-tls": ("obstore_torch",),
    "dcp-save-1": ("gcsfs_dcp",),
    "dcp-load-4": ("gcsfs_dcp",),
    "map-single": ("aioflux_sync",),
    "load-small": ("gcsfs_steps",),
    "ratio-get-1KiB": ("obstore_crc32c", "raw", "aioflux_unverified"),
    "ratio-get-range-1MiB": ("obstore",),
    "ratio-get-1GiB-tls": ("obstore_ranges",),
    "ratio-load-1GiB": ("obstore_ranges",),
    "ratio-put-1GiB": ("obstore_crc32c",),
    "ratio-save-298MB": ("google_checkpoint",),
    "ratio-save-async-first": ("memory_copy",),
    "opening-tls": ("obstore",),
    "gets-1M": ("aioflux",),
    "list-10M": ("aioflux_map",),
    "ray-read": ("gcsfs_ray",),
    "ray-write": ("gcsfs_ray",),
}


def run(out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status and the lines of the samples of a run."""
    status = main([*arguments, "--toy", "--out", str(out)])
    (log,) = out.glob("*.jsonl")
    header, *lines = map(json.loads, log.read_text().splitlines())
    assert header["command"].startswith(f"python -m perf {arguments[0]}")
    assert {"versions", "machine", "commit"} <= set(header)
    return status, lines


@pytest.mark.parametrize("name", PEERS)
def test_a_scenario_moves_all_bytes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = run(tmp_path, name, "--peers", *PEERS[name])
    assert [line["error"] for line in lines] == [""] * len(lines)
    assert status == 0
    assert len(lines) >= 2 * len(PEERS[name])
    for ours, theirs in zip(lines[::2], lines[1::2], strict=True):
        assert (ours["side"], theirs["side"]) == ("ours", "theirs")
        assert ours["match"] == theirs["match"]
        assert all(line["result"]["seconds"] > 0 for line in (ours, theirs))
    text = capsys.readouterr().out
    promises = [row for row in text.splitlines() if row.startswith(f"{name} (memory above")]
    assert all(" MiB  " in row and " met " in row for row in promises)


def test_a_peer_that_is_missing_is_a_row_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.__main__.known_peers", lambda: ["nosuch", "obstore"])
    monkeypatch.setattr("perf.__main__.RESULTS", tmp_path / "results")
    options = ("--server", "embedded", "--keep", "all")
    status, lines = run(tmp_path, "get-1KiB", "--peers", "nosuch", "obstore", *options)
    assert status == 0
    assert [bool(line["error"]) for line in lines] == [False, True, False, False]
    assert "! nosuch failed 1 of 1 times: ModuleNotFoundError: No module named" in (
        capsys.readouterr().out
    )
    (log,) = tmp_path.glob("*.jsonl")
    assert (tmp_path / "results" / "all.jsonl").read_text() == log.read_text()


def test_a_server_that_does_not_start_is_a_row_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def servers(spec: ServerSpec) -> Server:
        raise OSError(f"no room for {spec.kind}")

    run = Run(args=parser().parse_args([]), log=tmp_path / "run.jsonl")
    scenario = SCENARIOS["get-1KiB"]
    assert play_match(run, scenario, scenario.matches()[0], servers) == []
    assert run.has_failed
    assert "! OSError: no room for nginx" in capsys.readouterr().out
