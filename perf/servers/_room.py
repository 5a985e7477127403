"""Where objects and files of a measurement lie: in memory, where there is room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["place"]

_SLACK_BYTES = 64 << 20


def place(num_bytes: int) -> Path | None:
    """Return where so many bytes fit in memory; None is the directory for temporary files."""
    memory = Path("/dev/shm")  # noqa: S108  a directory of our own is made in it
    try:
        free = shutil.disk_usage(memory).free
    except OSError:
        return None
    fits = os.access(memory, os.W_OK) and free > num_bytes + _SLACK_BYTES
    return memory if fits else None
