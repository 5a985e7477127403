"""obstore in DataLoader workers: the objects of a batch are read concurrently."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from perf.peers._loading import Datasets, decode
from perf.peers.google import open_bucket
from perf.peers.obstore import open_store

if TYPE_CHECKING:
    from obstore.store import GCSStore

    from perf.work import Work


class _Objects(Dataset[Any]):
    """A map-style dataset of objects; the objects of a batch are read concurrently."""

    def __init__(self, work: Work) -> None:
        self._work = work
        # Not listed with obstore: after it has started threads, forked workers would hang.
        self._keys = [blob.name for blob in open_bucket(work).list_blobs(prefix=work.prefix)]
        self._item = decode(work)
        self._store: GCSStore | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return asyncio.run(self._fetch(indices))

    async def _fetch(self, indices: list[int]) -> list[Any]:
        store = self._store = self._store or open_store(self._work)

        async def one(index: int) -> Any:
            response = await store.get_async(self._keys[index])
            return self._item(await response.bytes_async())

        return list(await asyncio.gather(*map(one, indices)))


_DATASETS = Datasets(_Objects)
prepare = _DATASETS.prepare


async def load(work: Work) -> tuple[int, float]:
    """Read an epoch of a map-style dataset."""
    return _DATASETS.epoch(work)
