"""google-cloud-storage in DataLoader workers: a simple dataset that reads one object at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from perf.peers._loading import Datasets, OneByOne, decode
from perf.peers.google import open_bucket

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Moved, Work


def _keys(work: Work) -> list[str]:
    return [blob.name for blob in open_bucket(work).list_blobs(prefix=work.prefix)]


def _reader(work: Work) -> Callable[[str], bytes]:
    """Open a client; return a function that reads a key."""
    bucket = open_bucket(work, num_connections=1)

    def read(key: str) -> bytes:
        data: bytes = bucket.blob(key).download_as_bytes()
        return data

    return read


class _Objects(Dataset[Any]):
    """A map-style dataset of objects."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._keys = _keys(work)
        self._item = decode(work)
        self._read: Callable[[str], bytes] | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Any:
        # Opened in the worker, because processes must not share a client.
        self._read = self._read or _reader(self._work)
        return self._item(self._read(self._keys[index]))


def _stream(work: Work) -> OneByOne:
    return OneByOne(_keys(work), partial(_reader, work), decode(work))


_DATASETS: dict[str, Datasets] = {"load": Datasets(_Objects), "stream": Datasets(_stream)}


def prepare(work: Work) -> None:
    """Build the dataset."""
    _DATASETS[work.operation].prepare(work)


async def load(work: Work) -> Moved:
    """Read an epoch of a map-style dataset."""
    return _DATASETS["load"].epoch(work)


async def stream(work: Work) -> Moved:
    """Read an epoch of an iterable dataset."""
    return _DATASETS["stream"].epoch(work)
