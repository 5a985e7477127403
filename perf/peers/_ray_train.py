"""Base of the peers on Ray Train: a run of one worker, which trains and saves a state at times.

The measured time is the mean time for which a save blocks the worker's loop, without the first save
of the run. The worker trains between the saves; if an upload has not ended before the next save,
the wait for it counts, too.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from perf.peers._ray import start  # before other imports of Ray

from pyarrow.fs import FileSelector, FileType  # type: ignore[import-untyped]  # isort: skip
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from perf.states import state_of
from perf.training import train
from perf.work import WARM_UP_BYTES, OperationResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from perf.work import Work

__all__ = ["run", "train_and_save"]

_NAME = "run"
_NUM_SAVES = 4
"""Saves of a run that count, after the first one."""


def run(loop: Callable[[dict[str, Any]], Any], filesystem: Any, work: Work) -> OperationResult:
    """Train on one worker, and return the figures of the saves.

    Args:
        loop: The worker's function. Its argument is for `train_and_save`, whose figures it returns.
        filesystem: The storage of the run.
        work: One state, saved after each `in_flight` training steps.

    Raises:
        RuntimeError: The last save is not in the storage.
    """
    start()
    if work.size_bytes <= WARM_UP_BYTES:
        return OperationResult(work.size_bytes)  # no warm-up: the first save is not measured
    path = f"{work.bucket}/train-{uuid.uuid4().hex}"
    trainer = TorchTrainer(
        loop,
        train_loop_config={
            "dtype": work.dtype,
            "size_bytes": work.size_bytes,
            "num_steps": work.in_flight,
        },
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name=_NAME,
            storage_path=path,
            storage_filesystem=filesystem,
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    result: Any = trainer.fit()
    last = 1 + _NUM_SAVES
    checkpoint = result.checkpoint
    stored = _stored_bytes(checkpoint.filesystem, checkpoint.path) if checkpoint else 0
    if (result.metrics or {}).get("step") != last or stored < work.size_bytes:
        raise RuntimeError(f"{work.peer} saved {stored} bytes in step {last}: {work}")
    filesystem.delete_dir(path)
    return OperationResult(work.size_bytes, figures={"num_objects": 1, **result.return_value})


def train_and_save(
    save: Callable[[int, dict[str, torch.Tensor]], object], config: dict[str, Any]
) -> dict[str, float]:
    """Train in a worker, and call `save` with the number of the save, counted from 1, and a state.

    Returns:
        Means of all saves but the first one: `seconds`, for which a save blocked the loop, and
        `cpu_seconds` of the worker and `loop_seconds` with the training steps before the save.
        `first_seconds`, for which the first save blocked the loop.
    """
    state = state_of(config["dtype"], config["size_bytes"])
    num_steps = config["num_steps"]
    blocked: list[float] = []
    begun: list[tuple[float, float]] = []

    def after(step: int) -> None:
        number, rest = divmod(step + 1, num_steps)
        if rest:
            return
        before = time.perf_counter()
        save(number, state)
        blocked.append(time.perf_counter() - before)
        if not begun:
            begun.append((time.perf_counter(), time.process_time()))

    train((1 + _NUM_SAVES) * num_steps, after)
    ((seconds, cpu_seconds),) = begun
    return {
        "seconds": sum(blocked[1:]) / _NUM_SAVES,
        "cpu_seconds": (time.process_time() - cpu_seconds) / _NUM_SAVES,
        "loop_seconds": (time.perf_counter() - seconds) / _NUM_SAVES,
        "first_seconds": blocked[0],
    }


def _stored_bytes(filesystem: Any, path: str) -> int:
    """Return the size of all objects below a path."""
    found = filesystem.get_file_info(FileSelector(path, recursive=True))
    return sum(each.size for each in found if each.type == FileType.File)
