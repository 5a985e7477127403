"""Reads, caches and saves; stdin has the server, and the content of a key file, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import aioflux
from aioflux.checkpoint import Checkpointer
from aioflux.data import IterableDataset, MapDataset, Sample, loader


def size_of(sample: Sample) -> int:
    return len(sample.data)


def main(*, endpoint_url: str, credentials: dict[str, Any]) -> None:
    options: Any = {"endpoint_url": endpoint_url, "credentials": credentials}
    with aioflux.sync.open_store("gs://bucket/train", **options) as store:
        store.put_many((f"{number}", b"x" * number) for number in range(1, 9))
        with store.open_writer("large") as writer:
            writer.write(bytes(20 * 1024 * 1024))
        store.save_manifest("manifest")
    by_index = MapDataset("gs://bucket/train", transform=size_of, cache="cache", **options)
    list(loader(by_index, batch_size=4, num_workers=1, start_method="fork"))
    stream = IterableDataset("gs://bucket/train", cache="cache", **options)
    assert len(list(stream)) == 10
    assert stream.stats.num_cache_hits == 10
    with Checkpointer("gs://bucket/run", **options) as checkpointer:
        checkpointer.save(1, {"weight": torch.zeros(1000), "epoch": 1})
        assert checkpointer.load()["epoch"] == 1


if __name__ == "__main__":
    main(**json.load(sys.stdin))
