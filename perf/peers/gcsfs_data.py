"""gcsfs in DataLoader workers: the objects of a batch concurrently, large objects with prefetch."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from perf.peers._loading import Datasets, OneByOne, Records, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Moved, Work

# Read when gcsfs is imported. Without it, gcsfs requests the bucket type over gRPC, for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcsfs  # type: ignore[import-untyped]

LARGE_BYTES = 16 << 20
"""Objects of at least this size are read as files, which gcsfs prefetches."""


def _open(work: Work) -> Any:
    return gcsfs.GCSFileSystem(
        token="anon",  # noqa: S106  no secret
        endpoint_url=work.url,
        cache_timeout=0,
    )


def _paths(work: Work) -> list[str]:
    return sorted(_open(work).find(f"{work.bucket}/{work.prefix}"))


class _Objects(Dataset[Any]):
    """A map-style dataset of objects; the objects of a batch are read concurrently."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._paths = _paths(work)
        self._item = decode(work)
        self._filesystem: Any = None

    def __len__(self) -> int:
        return len(self._paths)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        # Opened in the worker, because a fork does not copy the thread of gcsfs.
        self._filesystem = self._filesystem or _open(self._work)
        paths = [self._paths[index] for index in indices]
        if self._work.size_bytes >= LARGE_BYTES:
            return [self._item(self._read(path)) for path in paths]
        bodies = self._filesystem.cat(paths)
        # For a single path, `cat` returns bytes.
        found = [bodies] if isinstance(bodies, bytes) else [bodies[path] for path in paths]
        return [self._item(data) for data in found]

    def _read(self, path: str) -> bytes:
        with self._filesystem.open(path, "rb") as file:
            data: bytes = file.read()
            return data


def _opener(work: Work) -> Callable[[str], Any]:
    return partial(_open(work).open, mode="rb")


def _dataset(work: Work) -> Any:
    if not work.record_bytes:
        return _Objects(work)
    return Records(OneByOne(_paths(work), partial(_opener, work), lambda file: file), work)


_DATASETS = Datasets(_dataset)
prepare = _DATASETS.prepare


async def load(work: Work) -> Moved:
    """Read an epoch of a map-style dataset; files of records are read one after the other."""
    return _DATASETS.epoch(work)
