"""aioflux.data: a MapDataset of many objects, without reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.data import MapDataset

if TYPE_CHECKING:
    from perf.work import Work


async def list_all(work: Work) -> int:
    """Build a dataset of all objects of a set, and return their bytes."""
    return len(MapDataset(work.uri(work.prefix), endpoint_url=work.url)) * work.size_bytes
