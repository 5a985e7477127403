"""The example of asynchronous checkpoints as its page says: both runs end alike."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "checkpoint_async" / "checkpoint_async.py"


def run() -> str:
    environment = {
        key: value for key, value in os.environ.items() if key != "STORAGE_EMULATOR_HOST"
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def check(said: str) -> None:
    saved = re.findall(r"step +(\d+) .* staged in .* committed after", said)
    assert saved == ["5", "10", "15", "20", "25", "30", "35", "40"]
    assert re.search(r"resumed from step 25; saved steps: \[.*20, 25\]", said)
    assert "both runs end with the same weights: True" in said


def test_both_runs_end_alike_on_a_server_of_its_own() -> None:
    check(run())


def test_it_leaves_nothing_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run in this process, which has imported PyTorch already."""
    spec = importlib.util.spec_from_file_location("checkpoint_async", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = ["--uri", f"file://{tmp_path}", "--staging", "process"]
    monkeypatch.setattr(sys, "argv", ["checkpoint_async.py", *options])
    example.main()
    check(capsys.readouterr().out)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
