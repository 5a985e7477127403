"""Train a small 3D U-Net on volumes in a bucket; after a kill, resume from the newest checkpoint.

    python examples/image_segmentation/segmentation.py                      server of its own
    python examples/image_segmentation/segmentation.py --uri gs://bucket/run-1
    torchrun --nproc-per-node 2 examples/image_segmentation/segmentation.py --uri gs://bucket/run-1

The volumes are made: bright ellipsoids in noise that is stronger than they are, so that no
threshold finds more than a third of them. `train/0017.npz` holds an image and the mask of what is
to be found in it.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import time
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import aioflux
from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.data import IterableDataset, MapDataset, Sample, loader, merge_states
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SIZE = 24
"""Voxels along each edge of a volume."""
NUM_VOLUMES = {"train": 40, "test": 8}
BATCH_SIZE = 4
NUM_KEPT = 2
"""Number of checkpoints to keep, besides the one from which the training resumed."""
GOAL = 0.80


def made_volume(number: int) -> tuple[NDArray[np.float16], NDArray[np.bool_]]:
    """Return a random image and its mask; `number` is the seed."""
    random = np.random.default_rng(number)
    mask = np.zeros((SIZE, SIZE, SIZE), dtype=bool)
    places = np.indices(mask.shape).reshape(3, -1).T
    for _ in range(3):
        center, radii = random.uniform(6, SIZE - 6, 3), random.uniform(3, 7, 3)
        inside = (((places - center) / radii) ** 2).sum(axis=1) < 1
        mask |= inside.reshape(mask.shape)
    image = mask + random.normal(scale=1.2, size=mask.shape)
    return image.astype(np.float16), mask


def missing_volumes(present: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield keys and bytes of the volumes that are not in the bucket yet."""
    for number, (part, index) in enumerate(
        (part, index) for part, count in NUM_VOLUMES.items() for index in range(count)
    ):
        key = f"{part}/{index:04d}.npz"
        if key not in present:
            image, mask = made_volume(number)
            file = io.BytesIO()
            np.savez(file, image=image, mask=mask)
            yield key, file.getvalue()


def decode(sample: Sample) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return image, mask and name of an object; runs in the process that reads the object."""
    with np.load(io.BytesIO(sample.data)) as arrays:
        image, mask = arrays["image"].astype(np.float32), arrays["mask"].astype(np.float32)
    return torch.from_numpy(image)[None], torch.from_numpy(mask)[None], sample.key[-8:-4]


def convolutions(num_in: int, num_out: int) -> nn.Sequential:
    """Return two convolutions, each with a normalization."""
    layers: list[nn.Module] = []
    for num in (num_in, num_out):
        layers += [nn.Conv3d(num, num_out, 3, padding=1), nn.InstanceNorm3d(num_out), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A 3D U-Net of two levels, with logits of the mask as output."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down_1 = convolutions(1, width)
        self.down_2 = convolutions(width, 2 * width)
        self.bottom = convolutions(2 * width, 4 * width)
        self.widen_2 = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
        self.up_2 = convolutions(4 * width, 2 * width)
        self.widen_1 = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.up_1 = convolutions(2 * width, width)
        self.last = nn.Conv3d(width, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one logit for each voxel."""
        first = self.down_1(images)
        second = self.down_2(nn.functional.max_pool3d(first, 2))
        bottom = self.bottom(nn.functional.max_pool3d(second, 2))
        up = self.up_2(torch.cat([self.widen_2(bottom), second], dim=1))
        up = self.up_1(torch.cat([self.widen_1(up), first], dim=1))
        return self.last(up)


def overlap(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return the Dice coefficient: 1 if prediction and mask are equal, 0 if they are disjoint."""
    predicted = logits.sigmoid()
    return (2 * (predicted * masks).sum() + 1) / (predicted.sum() + masks.sum() + 1)


class Flips:
    """Random flips of volumes; a checkpoint contains the state of their generator."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *volumes: torch.Tensor) -> list[torch.Tensor]:
        """Flip all volumes along the same random axes."""
        axes = [axis for axis in (2, 3, 4) if torch.rand(1, generator=self._generator) < 0.5]
        return [each.flip(axes) for each in volumes]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state for `load_state_dict`."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load a state of `state_dict`."""
        self._generator.set_state(state["generator"])


def train(uri: str, options: argparse.Namespace, endpoint_url: str | None) -> UNet | None:
    """Train from the newest checkpoint; return the model, or None after a signal to stop."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    dataset = IterableDataset(
        f"{uri}train", transform=decode, shuffle=True, endpoint_url=endpoint_url
    )
    if options.workers:
        batches = loader(
            dataset, batch_size=BATCH_SIZE, num_workers=options.workers, resumable=True
        )
    else:
        batches = loader(dataset, batch_size=BATCH_SIZE, num_threads=1)

    torch.manual_seed(0)
    model, flips = UNet(), Flips()
    network = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    training = TrainingState(
        model, optimizer, dataset=batches, merge=merge_states, rng=False, flips=flips
    )
    training.values = {"epoch": 0, "step": 0}

    with Checkpointer(
        f"{uri}checkpoints",
        every=options.save_every,
        keep_last=NUM_KEPT,
        endpoint_url=endpoint_url,
    ) as checkpoints:
        checkpoints.save_on_signal(signal.SIGTERM, signal.SIGINT)
        if checkpoints.latest() is not None:
            checkpoints.load(into=training)
            print(f"resumed from step {checkpoints.loaded_step}", flush=True)
        step = training.values["step"]
        for epoch in range(training.values["epoch"], options.epochs):
            dataset.set_epoch(epoch)  # another order, the same on all ranks
            for images, masks, names in batches:
                images, masks = flips(images, masks)
                logits = network(images)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, masks)
                loss = loss + 1 - overlap(logits, masks)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                line = f"epoch {epoch} step {step} rank {rank} loss {loss.item():.3f} on"
                print(line, *names, flush=True)
                training.values = {"epoch": epoch, "step": step}
                if checkpoints.should_save(step):
                    checkpoints.save_async(step, training)
                if checkpoints.is_stopping:
                    print(f"stopped and saved at step {step}", flush=True)
                    return None
        training.values = {"epoch": options.epochs, "step": step}
        if step != checkpoints.loaded_step:
            checkpoints.save(step, training)
    return model.eval()


def make_data(store: aioflux.sync.Store) -> None:
    """Upload the missing volumes on one rank; the other ranks wait."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        present = {meta.key for meta in store.list()}
        num_made = len(store.put_many(missing_volumes(present)))
        print(f"made {num_made} volumes", flush=True)
    if dist.is_initialized():
        dist.barrier()


def run(uri: str, options: argparse.Namespace, endpoint_url: str | None = None) -> None:
    """Create the volumes, train, and test the model on other volumes."""
    torch.set_num_threads(1)  # the network is too small for more threads
    with aioflux.sync.open_store(uri, endpoint_url=endpoint_url) as store:
        make_data(store)
        begun = time.perf_counter()
        model = train(store.uri, options, endpoint_url)
    if model is None:
        raise SystemExit(os.EX_TEMPFAIL)
    print(f"trained for {time.perf_counter() - begun:.1f} s")

    test = MapDataset(f"{store.uri}test", transform=decode, endpoint_url=endpoint_url)
    images, masks, _ = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        found = overlap((model(images) > 0) * 1e3 - 500, masks).item()
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    print(f"weights {zlib.crc32(weights.numpy().tobytes()):08x}")
    print(f"overlap with the masks of {len(test)} test volumes: {found:.1%}")
    if found < GOAL:
        raise SystemExit("the example failed")


def main() -> None:
    """Choose the bucket and run; under torchrun, this process is one of several ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--uri", help="prefix for volumes and checkpoints, such as gs://bucket/run-1"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=4, metavar="STEPS")
    options = parser.parse_args()
    if options.uri is None:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket/segmentation", options, server.url)
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        try:
            run(options.uri, options)
        finally:
            dist.destroy_process_group()
    else:
        run(options.uri, options)


if __name__ == "__main__":
    main()
