"""The example of Ray Data on a server of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]


def test_the_even_rows_are_committed() -> None:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as tmp:
        settings = {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": tmp,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "ray_data" / "ray_data.py")],
            capture_output=True,
            text=True,
            env={**os.environ, **settings},
        )
    assert done.returncode == 0, done.stderr
    assert "committed 400 rows by gs://bucket/out/aioflux-manifest" in done.stdout
