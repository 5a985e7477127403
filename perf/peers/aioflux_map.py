"""aioflux.data: a MapDataset of many objects, which is listed only, or read by index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.data import MapDataset
from perf._meter import steady

if TYPE_CHECKING:
    from perf.work import Work


async def list_all(work: Work) -> int:
    """Build a dataset of all objects of a set, and return their bytes."""
    return len(MapDataset(work.uri(work.prefix), endpoint_url=work.url)) * work.size_bytes


async def load_items(work: Work) -> int:
    """Read the items of a dataset in order, `batch_size` at a time, and return their bytes."""
    dataset = MapDataset(work.uri(work.prefix), endpoint_url=work.url)

    async def load(work: Work) -> int:
        if work.batch_size == 1:
            return sum(len(dataset[index].data) for index in range(work.num_objects))
        indices = range(work.num_objects)
        batches = (
            dataset.__getitems__(indices[start : start + work.batch_size])
            for start in range(0, work.num_objects, work.batch_size)
        )
        return sum(len(sample.data) for batch in batches for sample in batch)

    return await steady(load, work)
