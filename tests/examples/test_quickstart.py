"""The quickstart runs as its page says: it learns, and leaves a real place as it was."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quickstart" / "quickstart.py"


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


@pytest.mark.more
def test_it_learns_from_a_server_of_its_own() -> None:
    said = run()
    assert "the loaded model predicts the same: True" in said
    for step in ("put 1,797 images", "train, epoch 6", "save model.pt", "load model.pt"):
        assert step in said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["own server", "given uri"])
def test_it_saves_a_model_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    elsewhere: bool,
) -> None:
    """Run in this process, which has imported PyTorch already, with few images."""
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    some = list(itertools.islice(example.digit_images(), 100))
    for name, value in {"NUM_EPOCHS": 1, "GOAL": -1, "digit_images": lambda: some}.items():
        monkeypatch.setattr(example, name, value)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    given = ["--uri", f"file://{tmp_path}"] if elsewhere else []
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *given])
    example.main()
    printed = capsys.readouterr().out
    assert "the loaded model predicts the same: True" in printed
    assert ("delete all of it" in printed) is elsewhere
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
