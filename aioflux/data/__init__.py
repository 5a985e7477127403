"""PyTorch datasets over the objects below a uri.

    dataset = IterableDataset("gs://bucket/train", transform=decode, shuffle=True, seed=0)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for batch in DataLoader(dataset, batch_size=64, num_workers=4): ...

One object is one sample, unless `records=` splits objects into records. `MapDataset` has a length
and is read by index. `IterableDataset` is a stream, shared among ranks and workers. Both datasets
list the objects once, in the constructor, and sort them by key. They read the listed generations:
if an object was replaced after the listing, reading that object raises an error. Each worker opens
its own connections, whether started by fork, spawn or forkserver.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401  all modules below import torch
except ModuleNotFoundError as exc:
    from aioflux._values.distribution import pip_install

    raise ModuleNotFoundError(
        f"aioflux.data needs PyTorch: {pip_install('torch')}", name=exc.name
    ) from exc

from aioflux.data._counters import LoadStats
from aioflux.data._iterable_dataset import IterableDataset
from aioflux.data._loader import loader
from aioflux.data._map_dataset import MapDataset
from aioflux.data._records.formats import Records, StreamRecords, jsonl, parquet, tar
from aioflux.data._resume import merge_states
from aioflux.data._sample import Sample
from aioflux.data._sampler import ObjectSampler
from aioflux.data._store_batches import store_batches

__all__ = [
    "IterableDataset",
    "LoadStats",
    "MapDataset",
    "ObjectSampler",
    "Records",
    "Sample",
    "StreamRecords",
    "jsonl",
    "loader",
    "merge_states",
    "parquet",
    "store_batches",
    "tar",
]
