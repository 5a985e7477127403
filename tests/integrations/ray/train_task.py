"""A training function for Ray Train, which records each step of each worker in a directory."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist

from aioflux.checkpoint import TrainingState
from aioflux.data import IterableDataset, Sample, merge_states
from aioflux.integrations.ray import RayCheckpointer

SEED = 3
EVERY = 2
"""Steps between two scheduled saves."""


def to_tensor(sample: Sample) -> tuple[str, torch.Tensor]:
    return sample.key, torch.tensor(list(sample.data), dtype=torch.float32) / 255


def digest(training: TrainingState) -> str:
    """Return a hash of the bits of the model and the optimizer, which are the same on all ranks."""
    state = training.state_dict()
    hashed = hashlib.sha256()
    for name, tensor in sorted(state["model"].items()):
        hashed.update(name.encode() + tensor.numpy().tobytes())
    for number, values in sorted(state["optimizer"]["state"].items()):
        for name, tensor in sorted(values.items()):
            hashed.update(f"{number}.{name}".encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


class Record:
    """The lines of one worker process."""

    def __init__(self, directory: str, rank: int) -> None:
        path = Path(directory, f"{time.time_ns()}-{rank}.jsonl")
        self._file = path.open("a", encoding="utf-8")
        self._values = {"rank": rank}

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **self._values, **values}) + "\n")
        self._file.flush()

    def start(self, **values: Any) -> None:
        """Write the start of the training; the values are part of all later lines, too."""
        self._values.update(values)
        self.write("start", pid=os.getpid())


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the whole lines of all processes, in order of their starts."""
    return [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def train(config: dict[str, Any]) -> None:
    """Train for one epoch.

    `config["events"]` maps the step that was restored to the events of this attempt: `block_at` is
    a step after which rank 0 blocks; in step `preempted_at` all ranks wait for a preemption.
    """
    warnings.filterwarnings("ignore", "the checkpoint has random generators", RuntimeWarning)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    record = Record(config["directory"], rank)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
    )
    torch.manual_seed(SEED + rank)  # of the dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = IterableDataset(
        "gs://bucket/in",
        transform=to_tensor,
        shuffle=True,
        seed=SEED,
        tail="uneven",
        endpoint_url=config["endpoint_url"],
    )
    training = TrainingState(model, optimizer, dataset=dataset, merge=merge_states)
    with RayCheckpointer(every=EVERY, heartbeat_seconds=1) as checkpoints:
        step = checkpoints.restore(training) or 0
        events = config["events"][str(step)]
        record.start(world_size=world_size, restored=step, digest=digest(training))
        for key, values in dataset:
            step += 1
            loss = model(values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            # DistributedDataParallel adds in another order in its first steps.
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optimizer.step()
            record.write("step", step=step, key=key, digest=digest(training))
            while step == events.get("preempted_at") and not ray.train.get_preemption_info():
                time.sleep(0.05)
            if checkpoints.should_save(step):
                checkpoints.report(step, training, {"loss": float(loss), "step": step})
                record.write("report", step=step)
            if step == events.get("block_at") and rank == 0:
                threading.Event().wait()
