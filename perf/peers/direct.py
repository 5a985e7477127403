"""google-cloud-storage in DataLoader workers: a simple dataset that reads one object at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from perf.peers._loading import Datasets, decode
from perf.peers.google import open_bucket

if TYPE_CHECKING:
    from perf.work import Work


class _Objects(Dataset[Any]):
    """A map-style dataset of objects."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._keys = [blob.name for blob in open_bucket(work).list_blobs(prefix=work.prefix)]
        self._item = decode(work)
        self._bucket: Any = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Any:
        # Opened in the worker, because processes must not share a client.
        self._bucket = self._bucket or open_bucket(self._work, num_connections=1)
        return self._item(self._bucket.blob(self._keys[index]).download_as_bytes())


_DATASETS = Datasets(_Objects)
prepare = _DATASETS.prepare
load = _DATASETS.epoch
