"""Train a small classifier on images in a bucket, and save the model to the bucket.

    python examples/quickstart/quickstart.py                          with a local GCS server
    python examples/quickstart/quickstart.py --uri gs://bucket/tmp    with a real bucket

The data are scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, as PNG, with the
label in the key: `train/0123-7.png` shows a seven.
"""

from __future__ import annotations

import argparse
import io
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import aioflux
from aioflux.checkpoint import open_reader, open_writer
from aioflux.data import IterableDataset, MapDataset, Sample
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_EPOCHS = 6
BATCH_SIZE = 32
NUM_WORKERS = 2
GOAL = 0.90


@contextmanager
def step(name: str) -> Iterator[dict[str, int]]:
    """Measure a `with` block, which sets the objects and bytes that it moved; print a line."""
    moved = {"objects": 0, "bytes": 0}
    begun = time.perf_counter()
    yield moved
    seconds = time.perf_counter() - begun
    objects = f"{moved['objects'] / seconds:,.0f}" if moved["objects"] else ""
    megabytes = f"{moved['bytes'] / seconds / 1e6:,.2f}" if moved["bytes"] else ""
    print(f"{name:<40}{seconds:>7.2f} s{objects:>12}{megabytes:>9}", flush=True)


def digit_images() -> Iterator[tuple[str, bytes]]:
    """Yield keys and PNG images; every fifth image is a test image."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        file = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(file, "PNG")
        part = "train" if number % 5 else "test"
        yield f"{part}/{number:04d}-{label}.png", file.getvalue()


def decode(sample: Sample) -> tuple[torch.Tensor, int, int]:
    """Return image, label and size in bytes of an object; runs in the workers."""
    pixels = np.array(Image.open(io.BytesIO(sample.data)), dtype=np.float32)
    label = sample.key.removesuffix(".png").partition("-")[2]
    return torch.from_numpy(pixels)[None] / 255, int(label), len(sample.data)


def new_model() -> nn.Module:
    """Return a small convolutional network with new random weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(uri: str, endpoint_url: str | None) -> nn.Module:
    """Stream the training images once for each epoch, and return a trained model."""
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with step("list train/"):
        dataset = IterableDataset(f"{uri}/train", transform=decode, endpoint_url=endpoint_url)
    batches = DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, persistent_workers=True
    )
    for epoch in range(NUM_EPOCHS):
        with step(f"train, epoch {epoch + 1}") as moved:
            for images, labels, sizes in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                moved["objects"] += len(labels)
                moved["bytes"] += int(sizes.sum())
    return model.eval()


def read_test_images(uri: str, endpoint_url: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Read all test images by index, and return them with their labels."""
    dataset = MapDataset(f"{uri}/test", transform=decode, endpoint_url=endpoint_url)
    with step("read test/") as moved:
        batches = list(DataLoader(dataset, batch_size=64, num_workers=NUM_WORKERS))
        moved["objects"] = len(dataset)
        moved["bytes"] = sum(int(sizes.sum()) for _, _, sizes in batches)
    images, labels, _ = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def save(model: nn.Module, uri: str, endpoint_url: str | None) -> None:
    """Write the weights; the object becomes visible when the `with` block ends without an error."""
    with step("save model.pt") as moved:
        with open_writer(uri, endpoint_url=endpoint_url) as file:
            torch.save(model.state_dict(), file)
        moved["objects"], moved["bytes"] = 1, file.meta.size


def load(uri: str, endpoint_url: str | None) -> nn.Module:
    """Read the weights into a new model."""
    model = new_model()
    with (
        step("load model.pt") as moved,
        open_reader(uri, endpoint_url=endpoint_url) as file,
    ):
        model.load_state_dict(torch.load(file))
        moved["objects"], moved["bytes"] = 1, file.meta.size
    return model.eval()


def run(uri: str, endpoint_url: str | None = None) -> None:
    """Fill the bucket, train from it, save to it and load from it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more threads
    with (
        aioflux.sync.open_store(uri, endpoint_url=endpoint_url) as store,
        step("put 1,797 images") as moved,
    ):
        for batch in store.put_batches(digit_images()):
            moved["objects"] += len(batch)
            moved["bytes"] += sum(meta.size for meta in batch)

    model = train(uri, endpoint_url)
    images, labels = read_test_images(uri, endpoint_url)
    predictions = model(images).argmax(dim=1)
    accuracy = (predictions == labels).float().mean().item()

    save(model, f"{uri}/model.pt", endpoint_url)
    loaded = load(f"{uri}/model.pt", endpoint_url)
    same = torch.equal(loaded(images), model(images))

    print(f"\naccuracy on {len(labels)} test images: {accuracy:.1%}")
    print(f"the loaded model predicts the same: {same}")
    if accuracy <= GOAL or not same:
        raise SystemExit("the quickstart failed")


def main() -> None:
    """Choose the bucket, run, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--uri", help="a bucket and prefix, such as gs://bucket/tmp")
    parser.add_argument("--keep", action="store_true", help="do not delete the objects at the end")
    arguments = parser.parse_args()

    begun = time.perf_counter()
    print(f"{'step':<40}{'time':>9}{'objects/s':>12}{'MB/s':>9}\n{'-' * 70}")
    if arguments.uri is None:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket/quickstart", server.url)
    else:
        # A new prefix, so that no existing object is overwritten or deleted.
        uri = f"{arguments.uri.rstrip('/')}/quickstart-{uuid.uuid4().hex[:8]}"
        try:
            run(uri)
        finally:
            if not arguments.keep:
                with aioflux.sync.open_store(uri) as store, step("delete all of it") as moved:
                    deleted = store.delete_many(meta.key for meta in store.list_all()).deleted
                    moved["objects"] = len(deleted)
    print(f"total: {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
