"""Base of the peers on Ray: a node of two processors, which runs until the sample ends.

The driver, and all worker processes of Ray, run before the measured part: it is preceded by a small
dataset. The CPU time is that of the whole tree of processes; the peak of memory only the driver's.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]

# Read when Ray is imported, and by its processes. Without a token, it writes one into the home.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# See `perf.peers._gcsfs`.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import ray
import ray.data
import torch

from perf._meter import METER
from perf.work import Moved, OperationResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from perf.work import Work

__all__ = ["NUM_CPUS", "blocks", "finish", "read", "start", "write"]

NUM_CPUS = 2
"""Processors of the node."""
_STORE_BYTES = 2 << 30
_ROWS = 100
_directories: list[str] = []


def start() -> None:
    """Start the node, unless it runs."""
    if ray.is_initialized():
        return
    _directories.append(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, for sockets
    ray.init(
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=_directories[0],
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def finish(_: Work) -> None:
    """Stop the node after the measurement."""
    ray.shutdown()
    for directory in _directories:
        shutil.rmtree(directory, ignore_errors=True)


def read(dataset: Callable[[Work], ray.data.Dataset], work: Work) -> Moved:
    """Read all rows, with a column `bytes`, into batches of one tensor; see `_measure`."""

    def move(work: Work) -> int:
        batches: Any = dataset(work).iter_torch_batches(
            batch_size=work.batch_size, collate_fn=_tensor_of
        )
        return sum(batch.numel() for batch in batches)

    return _measure(move, work)


def write(write_blocks: Callable[[Work], int], work: Work) -> Moved:
    """Write the dataset `blocks(work)`; see `_measure`."""
    return _measure(write_blocks, work)


def blocks(work: Work) -> ray.data.Dataset:
    """Return a dataset of a block of `size_bytes` random bytes for each object."""
    num_bytes = work.size_bytes  # the tasks cannot import `Work`, which is in `__main__`

    def block(_: Any) -> pa.Table:
        from perf.work import body_of

        # A value repeats in the next blocks, but not in its own, up to 1 MiB.
        rows, size = body_of(num_bytes), num_bytes // _ROWS
        values = [rows[start : start + size] for start in range(0, size * _ROWS, size)]
        return pa.table({"bytes": pa.array(values, pa.large_binary())})

    numbers = ray.data.range(work.num_objects, override_num_blocks=work.num_objects)
    return numbers.map_batches(block, batch_size=None, batch_format="pyarrow")


def _tensor_of(batch: dict[str, np.ndarray]) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(batch["bytes"]), dtype=torch.uint8)


def _measure(move: Callable[[Work], int], work: Work) -> Moved:
    """Return the bytes of `move(work)`, which is the measured part, and its CPU time."""
    start()
    if work.has_opening:
        return move(work)
    move(work.opening())
    METER.begin(work)
    before = _cpu_seconds()
    num_bytes = move(work)
    cpu_seconds = _cpu_seconds() - before
    METER.end(work)
    if num_bytes != work.num_objects * work.size_bytes:
        raise RuntimeError(f"{work.peer} moved {num_bytes} bytes: {work}")
    figures = {"num_objects": work.num_objects, "cpu_seconds": cpu_seconds}
    return OperationResult(num_bytes, figures=figures)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants, also of those that have exited."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has exited
            continue
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    total, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        total += ticks.get(pid, 0)
        pids += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")
