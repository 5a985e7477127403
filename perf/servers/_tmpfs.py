"""Directory in memory for the objects and files of a benchmark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["memory_directory"]

_SLACK_BYTES = 64 << 20


def memory_directory(num_bytes: int) -> Path | None:
    """Return a directory in memory with space for `num_bytes`; None if there is not enough.

    Callers then use the directory for temporary files.
    """
    memory = Path("/dev/shm")  # noqa: S108  callers create their own directory in it
    try:
        free = shutil.disk_usage(memory).free
    except OSError:
        return None
    fits = os.access(memory, os.W_OK) and free > num_bytes + _SLACK_BYTES
    return memory if fits else None
