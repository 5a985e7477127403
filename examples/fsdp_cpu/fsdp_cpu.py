"""Train a sharded model in two processes, save the part of each process, and load it again.

    python examples/fsdp_cpu/fsdp_cpu.py                          with a local GCS server
    python examples/fsdp_cpu/fsdp_cpu.py --uri gs://bucket/tmp    with a real bucket

Two processes on the CPU (gloo) each have half of each weight (FSDP2, `fully_shard`). They stop, two
new processes resume, and at the end one process loads the whole model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import uuid
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aioflux
from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.testing import GCSServer

NUM_RANKS = 2
NUM_STEPS = 4
WIDTH = 256


def made_model() -> nn.Sequential:
    """Return the model with its initial weights."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def train(rank: int, uri: str, endpoint_url: str | None, meeting: str, until: int) -> None:
    """Train from the newest saved step to step `until`; each of the processes calls this."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = made_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = TrainingState(model, optimizer)
    # Every rank makes the same calls; one of them commits.
    with Checkpointer(uri, keep_last=2, endpoint_url=endpoint_url) as checkpointer:
        step = 0
        if checkpointer.latest() is not None:
            checkpointer.load(into=state)
            step = checkpointer.loaded_step or 0
        while step < until:
            batch = torch.randn(8, WIDTH)  # differs by rank; the checkpoint has the generators
            loss = ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            handle = checkpointer.save_async(step, state)
        result = handle.result()
    if rank == 0:
        print(
            f"{NUM_RANKS} ranks saved step {step}: {result.num_bytes / 1e6:.1f} MB from rank 0, "
            f"staged in {result.staged_seconds * 1e3:.1f} ms",
            flush=True,
        )
    dist.destroy_process_group()


def start(uri: str, endpoint_url: str | None, until: int) -> None:
    """Train up to a step in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (uri, endpoint_url, f"file://{folder}/meeting", until)
        torch.multiprocessing.start_processes(train, arguments, NUM_RANKS, start_method="spawn")


def weights(uri: str, endpoint_url: str | None) -> dict[str, Any]:
    """Return the complete weights of the newest step, loaded in this process."""
    model = made_model()
    with Checkpointer(uri, endpoint_url=endpoint_url) as checkpointer:
        checkpointer.load(into={"model": model})
        print(f"loaded step {checkpointer.loaded_step} whole, of {checkpointer.steps()}")
    return model.state_dict()


def run(uri: str, endpoint_url: str | None = None) -> None:
    """Train without and with a stop, and compare the weights."""
    start(f"{uri}/unbroken", endpoint_url, NUM_STEPS)
    start(f"{uri}/broken", endpoint_url, NUM_STEPS // 2)
    start(f"{uri}/broken", endpoint_url, NUM_STEPS)
    one, two = weights(f"{uri}/unbroken", endpoint_url), weights(f"{uri}/broken", endpoint_url)
    is_same = all(map(torch.equal, one.values(), two.values()))
    print(f"both runs end with the same weights: {is_same}")
    if not is_same:
        raise SystemExit("the example failed")


def main() -> None:
    """Choose the bucket, run, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--uri", help="a bucket and prefix, such as gs://bucket/tmp")
    parser.add_argument("--keep", action="store_true", help="do not delete the objects at the end")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.uri is None:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket/fsdp", server.url)
        return
    # A new prefix, so that no existing object is overwritten or deleted.
    uri = f"{arguments.uri.rstrip('/')}/fsdp-{uuid.uuid4().hex[:8]}"
    try:
        run(uri)
    finally:
        if not arguments.keep:
            with aioflux.sync.open_store(uri) as store:
                store.delete_many(store.list_all())


if __name__ == "__main__":
    main()
