"""Train on two workers of Ray Train, and resume after a worker has died."""

from __future__ import annotations

import argparse
import os
import signal
import uuid

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model

from aioflux import sync
from aioflux.checkpoint import TrainingState
from aioflux.data import IterableDataset, Sample, merge_states
from aioflux.integrations.ray import RayCheckpointer, storage_filesystem
from aioflux.testing import GCSServer


def to_tensor(sample: Sample) -> torch.Tensor:
    """Return the bytes of an object as a tensor."""
    return torch.tensor(list(sample.data), dtype=torch.float32)


def train(config: dict[str, str]) -> None:
    """Train for one epoch. In the first attempt, one worker dies after step 8."""
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = IterableDataset(transform=to_tensor, shuffle=True, **config)
    training = TrainingState(model, optimizer, dataset=data, merge=merge_states)
    with RayCheckpointer(every=2) as checkpoints:
        restored = checkpoints.restore(training) or 0
        for step, values in enumerate(data, restored + 1):
            loss = model(values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if checkpoints.should_save(step):  # also before a preemption
                metrics = {"loss": loss.item(), "step": step, "restored": restored}
                handle = checkpoints.report(step, training, metrics)
                if step == 8 and not restored and get_context().get_world_rank() == 1:
                    handle.result()  # waits for the commit
                    os.kill(os.getpid(), signal.SIGKILL)


def run(uri: str, **options: str) -> None:
    """Write 32 objects to the bucket, and train on them."""
    with sync.open_store(f"{uri}/data", **options) as store:
        store.put_many((f"{number:02d}", bytes([number] * 4)) for number in range(32))
    trainer = TorchTrainer(
        train,
        train_loop_config={"uri": f"{uri}/data", **options},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=uri.partition("://")[2],
            storage_filesystem=storage_filesystem(uri, **options),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics = trainer.fit().metrics or {}
    print(f"finished step {metrics['step']}, resumed after step {metrics['restored']}")


def main() -> None:
    """Run on the given bucket, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="prefix in a bucket; by default a server is started")
    uri = parser.parse_args().uri
    ray.init(include_dashboard=False, log_to_driver=False)
    if uri is not None:
        run(f"{uri.rstrip('/')}/{uuid.uuid4().hex[:8]}")
    else:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket/train", endpoint_url=server.url)
    ray.shutdown()


if __name__ == "__main__":
    main()
