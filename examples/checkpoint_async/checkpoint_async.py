"""Save a training run during the training, stop it, and resume it with the same result.

    python examples/checkpoint_async/checkpoint_async.py                          server of its own
    python examples/checkpoint_async/checkpoint_async.py --uri gs://bucket/tmp    a real bucket

A small network learns the sums of vectors in a bucket; each vector is an object. It is trained
twice: once without and once with a stop in the middle. Both runs end with the same weights.
"""

from __future__ import annotations

import argparse
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import aioflux
from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.data import IterableDataset, Sample
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_SAMPLES = 256
NUM_INPUTS = 16
WIDTH = 512
BATCH_SIZE = 16
NUM_STEPS = 40
STOP_AFTER = 27
SAVE_EVERY = 5


def made_samples() -> Iterator[tuple[str, bytes]]:
    """Yield key and bytes of each sample: 16 numbers from 0 to 255."""
    draw = np.random.default_rng(0)
    for number in range(NUM_SAMPLES):
        yield f"{number:04d}", draw.bytes(NUM_INPUTS)


def decode(sample: Sample) -> torch.Tensor:
    """Return the numbers of a sample, from 0 to 1."""
    return torch.tensor(list(sample.data), dtype=torch.float32) / 255


class Training:
    """A training run: model, optimizer, scheduler, dataset and the training loop."""

    def __init__(self, uri: str, endpoint_url: str | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(NUM_INPUTS, WIDTH),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=NUM_STEPS)
        self.dataset = IterableDataset(
            f"{uri}/train", transform=decode, shuffle=True, endpoint_url=endpoint_url
        )
        # Without workers the dataset has its position in the epoch. With workers, pass torchdata's
        # StatefulDataLoader instead.
        self.state = TrainingState(
            self.model, self.optimizer, scheduler=self.scheduler, dataset=self.dataset
        )
        self.step = 0

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the batches of all epochs, starting at the position of a loaded state."""
        epoch = self.state.values.get("epoch", 0)
        while True:
            self.dataset.set_epoch(epoch)
            self.state.values = {"epoch": epoch}
            # Starting an epoch draws a number from a generator, also after a resume. A separate
            # generator keeps torch's global generator the same in both runs.
            generator = torch.Generator()
            yield from DataLoader(self.dataset, batch_size=BATCH_SIZE, generator=generator)
            epoch += 1

    def run(self, checkpointer: Checkpointer, *, until: int) -> float:
        """Train up to a step with saves, and return the seconds spent in `save_async`."""
        waited = 0.0
        for batch in self.batches():
            if self.step == until:
                break
            loss = nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            if checkpointer.should_save(self.step):
                begun = time.perf_counter()
                checkpointer.save_async(self.step, self.state, {"loss": loss.item()})
                waited += time.perf_counter() - begun
        return waited


def run(uri: str, endpoint_url: str | None, staging: str) -> None:
    """Upload the samples, and train without and with a stop."""
    torch.set_num_threads(1)
    with aioflux.sync.open_store(f"{uri}/train", endpoint_url=endpoint_url) as store:
        store.put_many(made_samples())

    def checkpointer(name: str) -> Checkpointer:
        return Checkpointer(
            f"{uri}/{name}",
            every=SAVE_EVERY,
            keep_last=2,
            keep_best=("loss", "min"),
            staging=staging,
            endpoint_url=endpoint_url,
        )

    unbroken = Training(uri, endpoint_url)
    with checkpointer("unbroken") as saves:
        begun = time.perf_counter()
        waited = unbroken.run(saves, until=NUM_STEPS)
        seconds = time.perf_counter() - begun
    print(f"{NUM_STEPS} steps without a stop: {seconds:.2f} s, {waited:.3f} s of it in save_async")
    for record in saves_of(f"{uri}/unbroken", endpoint_url):
        print(record)

    first = Training(uri, endpoint_url)
    with checkpointer("broken") as saves:
        first.run(saves, until=STOP_AFTER)
    print(f"stopped after step {STOP_AFTER}")

    second = Training(uri, endpoint_url)
    with checkpointer("broken") as saves:
        saves.load(into=second.state)
        second.step = saves.loaded_step or 0
        print(f"resumed from step {second.step}; saved steps: {saves.steps()}")
        second.run(saves, until=NUM_STEPS)
    is_same = all(
        map(torch.equal, second.model.state_dict().values(), unbroken.model.state_dict().values())
    )
    print(f"both runs end with the same weights: {is_same}")
    if not is_same:
        raise SystemExit("the example failed")


def saves_of(uri: str, endpoint_url: str | None) -> Iterator[str]:
    """Yield a line for each save of the history."""
    with Checkpointer(uri, endpoint_url=endpoint_url) as checkpointer:
        for record in checkpointer.history():
            yield (
                f"  step {record.step:>3}  {record.num_bytes / 1e6:6.2f} MB  staged in "
                f"{record.staged_seconds * 1e3:6.1f} ms  {record.outcome} after "
                f"{record.upload_seconds * 1e3:6.1f} ms more"
            )


def main() -> None:
    """Choose the bucket, run, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--uri", help="a bucket and prefix, such as gs://bucket/tmp")
    parser.add_argument("--staging", choices=["thread", "process"], default="thread")
    parser.add_argument("--keep", action="store_true", help="do not delete the objects at the end")
    arguments = parser.parse_args()
    if arguments.uri is None:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket/run", server.url, arguments.staging)
        return
    # A new prefix, so that no existing object is overwritten or deleted.
    uri = f"{arguments.uri.rstrip('/')}/checkpoint-{uuid.uuid4().hex[:8]}"
    try:
        run(uri, None, arguments.staging)
    finally:
        if not arguments.keep:
            with aioflux.sync.open_store(uri) as store:
                store.delete_many(store.list_all())


if __name__ == "__main__":
    main()
