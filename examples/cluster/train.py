"""Train on several processes of a cluster; stop on SIGTERM, and resume with any number of ranks.

    torchrun --nproc-per-node 2 train.py --data gs://bucket/train --checkpoints gs://bucket/run-1

Slurm: `sbatch train.sbatch`. Kubernetes: `kubectl apply -f train.yaml`. The exit status is 75 after
a signal: the training is saved, and is not finished.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.data import IterableDataset, Sample, loader, merge_states

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH = 16


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `init_process_group`, computed from those of Slurm or Kubernetes."""
    if "RANK" in environment:  # torchrun has set them
        return {}
    if "SLURM_PROCID" in environment:
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_NTASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
        }
    return {"RANK": environment["JOB_COMPLETION_INDEX"]}  # WORLD_SIZE is in the manifest


def decode(sample: Sample) -> torch.Tensor:
    """Return the number of bytes of each value, modulo `WIDTH`."""
    counts = torch.bincount(torch.frombuffer(bytearray(sample.data), dtype=torch.uint8) % WIDTH)
    vector = torch.zeros(WIDTH)
    vector[: len(counts)] = counts
    return vector


def train(arguments: argparse.Namespace) -> int:
    """Train from the newest checkpoint to the last epoch, and return the exit status."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Every rank builds the dataset here; one of them lists the objects.
    dataset = IterableDataset(
        arguments.data, transform=decode, shuffle=True, seed=0, cache=arguments.cache
    )
    batches = loader(dataset, batch_size=arguments.batch_size, num_threads=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The states of the dataset of all ranks are merged, so that other numbers of ranks can resume.
    state = TrainingState(model, optimizer, dataset=batches, rng=False, merge=merge_states)
    state.values = {"epoch": 0, "step": 0}
    with Checkpointer(
        arguments.checkpoints, keep_last=2, every=arguments.save_every
    ) as checkpointer:
        checkpointer.save_on_signal(signal.SIGTERM, deadline_seconds=arguments.grace_seconds)
        if checkpointer.latest() is not None:
            checkpointer.load(into=state)
        step = state.values["step"]
        print(f"rank {rank} of {world_size} (process {os.getpid()}) at step {step}", flush=True)
        for epoch in range(state.values["epoch"], arguments.epochs):
            dataset.set_epoch(epoch)
            for batch in batches:
                loss = ((model(batch) - batch) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                state.values = {"epoch": epoch, "step": step}
                if rank == 0:
                    print(f"epoch {epoch} step {step}: loss {loss.item():.3f}", flush=True)
                if checkpointer.should_save(step):
                    checkpointer.save_async(step, state)
                if checkpointer.is_stopping:  # on all ranks after the same step
                    return os.EX_TEMPFAIL
        state.values = {"epoch": arguments.epochs, "step": step}
        checkpointer.save(step, state)
    if rank == 0:
        print(f"finished {arguments.epochs} epochs at step {step}", flush=True)
    return 0


def main() -> int:
    """Join the process group and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="uri of the training objects")
    parser.add_argument("--checkpoints", required=True, help="uri of the checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--cache", help="local directory that all ranks of a node share")
    parser.add_argument(
        "--grace-seconds", type=float, default=25.0, help="time from SIGTERM to SIGKILL"
    )
    arguments = parser.parse_args()
    os.environ.update(rank_variables(os.environ))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" with GPUs
    try:
        return train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
