"""Base of the peers that load batches for training. Imports torch, and no peer.

A dataset is built, with its listing, before the measured part. The measured part is the epoch, from
the start of the workers to their exit. All peers turn the bytes of an object into the same item:
their number, or a tensor.
"""

from __future__ import annotations

import io
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from perf.peers._accelerators import emulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from perf.work import Moved, Work

__all__ = [
    "Datasets",
    "OneByOne",
    "RecordSplitter",
    "Records",
    "data_loader",
    "decode",
    "epoch",
]


def _tensor_of(data: Any) -> torch.Tensor:
    # A copy: decoders copy too, and torch does not support read-only memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(work: Work) -> Callable[[Any], Any]:
    """Return the function that turns the bytes of an object into an item."""
    if work.is_image:
        return _size_and_image
    if work.item_bytes:
        return _Constant(work)
    return _tensor_of if work.is_whole else len


class _Constant:
    """Returns a constant tensor, as MLPerf's readers do. A class, because lambdas do not pickle."""

    def __init__(self, work: Work) -> None:
        self._num_bytes = work.record_bytes or work.size_bytes
        self._item = torch.ones(work.item_bytes, dtype=torch.uint8)

    def __call__(self, data: Any) -> torch.Tensor:
        if len(data) != self._num_bytes:
            raise ValueError(f"a sample of {len(data)} bytes, not {self._num_bytes}")
        return self._item


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
        self._load = load or data_loader
        self._datasets: dict[Work, Any] = {}

    def prepare(self, work: Work) -> None:
        """Build the dataset, and the image that is decoded."""
        if work.is_image:
            _jpeg()
        self._datasets[work] = self._make(work)

    def epoch(self, work: Work) -> Moved:
        """Read an epoch of the dataset of a work; build the dataset unless `prepare` did.

        With `work.utilization`, return the largest number of emulated accelerators instead.
        """
        if work not in self._datasets:
            self.prepare(work)
        read = emulate if work.utilization else epoch
        return read(self._datasets.pop(work), work, self._load)


def epoch(
    dataset: Any, work: Work, load: Callable[[Any, Work], Any] | None = None
) -> tuple[int, float]:
    """Load all batches of a dataset; return the bytes, and the time that the consumer waited.

    The waiting time includes the start of the workers.
    """
    num_bytes, waited_seconds = 0, 0.0
    begun = time.perf_counter()
    for batch in (load or data_loader)(dataset, work):
        waited_seconds += time.perf_counter() - begun
        sizes = batch[0] if work.is_image else batch
        num_bytes += batch.numel() if work.is_whole else int(sizes.sum())
        if work.step_seconds:
            time.sleep(work.step_seconds)
        begun = time.perf_counter()
    return num_bytes, waited_seconds


def data_loader(dataset: Any, work: Work) -> DataLoader[Any]:
    """Return the DataLoader of a dataset."""
    num_workers = work.num_workers
    return DataLoader(
        dataset,
        batch_size=work.batch_size,
        num_workers=num_workers,
        prefetch_factor=-(-work.prefetch_batches // num_workers) or None if num_workers else None,
    )


class RecordSplitter:
    """Splits a file into the items of its records, which have the same size."""

    takes_stream = True

    def __init__(self, work: Work) -> None:
        self._num_bytes = work.record_bytes
        self._item = decode(work)

    def __call__(self, file: Any, meta: object = None) -> Iterator[Any]:
        """Yield the items of all records."""
        while data := file.read(self._num_bytes):
            # obstore's files return less at the end of their buffer.
            while rest := len(data) < self._num_bytes and file.read(self._num_bytes - len(data)):
                data = bytes(data) + bytes(rest)
            yield self._item(data)


class Records(IterableDataset[Any]):
    """Items of the records of files, which the worker opens one after the other.

    Args:
        files: Yields the files of the calling worker, opened for reading.
        work: The work.
    """

    def __init__(self, files: Iterable[Any], work: Work) -> None:
        self._files = files
        self._split = RecordSplitter(work)

    def __iter__(self) -> Iterator[Any]:
        """Read the files of this worker."""
        for file in self._files:
            yield from self._split(file)


class OneByOne(IterableDataset[Any]):
    """A simple iterable dataset: each worker reads the objects of its share one after the other.

    Args:
        keys: Keys of all objects.
        open_reader: Called in the worker; returns a function that reads a key.
        item: Turns the bytes of an object into an item.
    """

    def __init__(
        self,
        keys: Sequence[str],
        open_reader: Callable[[], Callable[[str], bytes]],
        item: Callable[[bytes], Any],
    ) -> None:
        self._keys = keys
        self._open_reader = open_reader
        self._item = item

    def __iter__(self) -> Iterator[Any]:
        """Read the share of this worker."""
        read = self._open_reader()
        for key in _share(self._keys):
            yield self._item(read(key))


def _share(keys: Sequence[str]) -> Sequence[str]:
    """Return the keys of the calling worker; all keys outside of a worker."""
    worker = get_worker_info()
    return keys if worker is None else keys[worker.id :: worker.num_workers]
