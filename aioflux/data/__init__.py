"""PyTorch datasets over the objects below a uri.

    dataset = IterableDataset("gs://bucket/train", transform=decode, shuffle=True, seed=0)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for batch in DataLoader(dataset, batch_size=64, num_workers=4): ...

One object is one sample. `MapDataset` has a length and takes indices; `IterableDataset` streams,
split by rank and worker. Both list once, when they are built, sort by key, and read the generations
that they listed: an object that was replaced since is an error and never other data. Fork, spawn
and forkserver workers each open connections of their own.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401  all modules below need it
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "aioflux.data needs PyTorch: pip install 'aioflux[torch]'", name=exc.name
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
