"""obstore in DataLoader workers: the objects of a batch are read concurrently."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import obstore
from torch.utils.data import Dataset

from perf.peers._loading import Datasets, OneByOne, Records, decode
from perf.peers.google import open_bucket
from perf.peers.obstore import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore.store import GCSStore

    from perf.work import Moved, Work


BUFFER_BYTES = 16 << 20
"""Size of the ranges in which a file of records is read."""


def _keys(work: Work) -> list[str]:
    # Not listed with obstore: after it has started threads, forked workers would hang.
    return [blob.name for blob in open_bucket(work).list_blobs(prefix=work.prefix)]


class _Objects(Dataset[Any]):
    """A map-style dataset of objects; the objects of a batch are read concurrently."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._keys = _keys(work)
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


def _opener(work: Work) -> Callable[[str], Any]:
    return partial(obstore.open_reader, open_store(work), buffer_size=BUFFER_BYTES)


def _dataset(work: Work) -> Any:
    if not work.record_bytes:
        return _Objects(work)
    return Records(OneByOne(_keys(work), partial(_opener, work), lambda file: file), work)


_DATASETS = Datasets(_dataset)
prepare = _DATASETS.prepare


async def load(work: Work) -> Moved:
    """Read an epoch of a map-style dataset; files of records are read one after the other."""
    return _DATASETS.epoch(work)
