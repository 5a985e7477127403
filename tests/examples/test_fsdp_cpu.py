"""The example of a sharded model as its page says: two ranks save, others go on, one loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "fsdp_cpu" / "fsdp_cpu.py"


def test_a_run_of_two_ranks_goes_on_in_others() -> None:
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
    for line in (
        "2 ranks saved step 2",
        "2 ranks saved step 4",
        "loaded step 4 whole",
        "both runs end with the same weights: True",
    ):
        assert line in done.stdout
