"""Base of the peers that load batches for training. Imports torch, and no peer.

A dataset is built, with its listing, before the measured part. The measured part is the epoch, from
the start of the workers to their exit. All peers turn the bytes of an object into the same item:
their number, and with `Work.is_image` a decoded image.
"""

from __future__ import annotations

import io
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from perf.work import OperationResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Work

__all__ = ["Datasets", "decode", "epoch"]


def decode(work: Work) -> Callable[[Any], Any]:
    """Return the function that turns the bytes of an object into an item."""
    return _size_and_image if work.is_image else len


@cache
def _jpeg() -> bytes:
    """Return a JPEG of 500 x 375 pixels and 100 KiB, as large as an average image of ImageNet."""
    from PIL import Image  # matplotlib depends on it

    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(smooth).resize((500, 375)), dtype=np.int16)
    noisy = np.clip(pixels + rng.integers(-26, 27, pixels.shape), 0, 255).astype(np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noisy).save(encoded, "JPEG", quality=92)
    return encoded.getvalue()


def _size_and_image(data: Any) -> tuple[int, torch.Tensor]:
    """Decode a JPEG and crop the image to 224 x 224, as for a training on ImageNet.

    The objects of the server are no images, so that the same image is decoded for each.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(_jpeg())).convert("RGB").crop((138, 75, 362, 299))
    return len(data), torch.from_numpy(np.array(image))


class Datasets:
    """Builds datasets and reads their epochs; `prepare` builds before the measured part.

    Args:
        make: Builds the dataset of a work.
        load: Builds the loader of a dataset; by default a DataLoader.
    """

    def __init__(
        self, make: Callable[[Work], Any], load: Callable[[Any, Work], Any] | None = None
    ) -> None:
        self._make = make
        self._load = load
        self._datasets: dict[Work, Any] = {}

    def prepare(self, work: Work) -> None:
        """Build the dataset, and the image that is decoded."""
        if work.is_image:
            _jpeg()
        self._datasets[work] = self._make(work)

    async def epoch(self, work: Work) -> OperationResult:
        """Read an epoch of the dataset of a work; build the dataset unless `prepare` did."""
        if work not in self._datasets:
            self.prepare(work)
        return epoch(self._datasets.pop(work), work, self._load)


def epoch(
    dataset: Any, work: Work, load: Callable[[Any, Work], Any] | None = None
) -> OperationResult:
    """Load all batches of a dataset; return the bytes, and the time that the consumer waited.

    The waiting time includes the start of the workers.
    """
    num_bytes, waited_seconds = 0, 0.0
    begun = time.perf_counter()
    for batch in (load or _data_loader)(dataset, work):
        waited_seconds += time.perf_counter() - begun
        sizes = batch[0] if work.is_image else batch
        num_bytes += int(sizes.sum())
        if work.step_seconds:
            time.sleep(work.step_seconds)
        begun = time.perf_counter()
    return OperationResult(num_bytes, waited_seconds)


def _data_loader(dataset: Any, work: Work) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=work.batch_size, num_workers=work.num_workers)
