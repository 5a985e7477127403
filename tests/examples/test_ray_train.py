"""The examples of Ray Train and Ray Tune on a server of their own."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]


def run(name: str) -> str:
    """Run an example, and return its output."""
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as tmp:
        settings = {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": tmp,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / name / f"{name}.py")],
            capture_output=True,
            text=True,
            env={**os.environ, **settings},
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_training_resumes_after_a_worker_has_died() -> None:
    assert "finished step 16, resumed after step 8" in run("ray_train")


def test_the_trials_share_a_cache() -> None:
    """Two trials run at a time, and may read the same object at the same time."""
    (hits,) = re.findall(r"(\d+) of 256 objects from the cache", run("ray_tune"))
    assert int(hits) >= 256 - 2 * 32
