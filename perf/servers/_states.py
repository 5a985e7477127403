"""Files of torch.save, written by a separate process, because servers must not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["write_state"]

_ROOT = Path(__file__).resolve().parent.parent.parent
"""Working directory in which `python -m perf.states` finds the package `perf`."""


def write_state(dtype: str, size_bytes: int, target: Path) -> tuple[int, str]:
    """Write a state to a file; return the size and the crc32c of the file."""
    command = [sys.executable, "-m", "perf.states", dtype, str(size_bytes), str(target)]
    done = subprocess.run(  # noqa: S603  our own command
        command, cwd=_ROOT, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"perf.states failed: {done.stderr.strip().splitlines()[-1:]}")
    size, crc32c = json.loads(done.stdout)
    return int(size), str(crc32c)
