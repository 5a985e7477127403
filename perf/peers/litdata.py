"""litData's StreamingRawDataset in DataLoader workers, everything at its default.

It asks Google's service through obstore, whose address it does not let one choose; the environment
does. Its index is made by gcsfs as its own is, and is not kept: others list anew, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

# Read at import: otherwise gcsfs asks for the kind of a bucket over gRPC, which waits for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcsfs  # type: ignore[import-untyped]

from perf.peers._loading import Datasets, decode

try:
    from litdata import StreamingRawDataset  # type: ignore[import-not-found]
    from litdata.raw.indexer import BaseIndexer, FileMetadata  # type: ignore[import-not-found]
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        f"{exc.name} is missing (pip install 'aioflux[perf-loading]')", name=exc.name
    ) from exc

if TYPE_CHECKING:
    from perf.work import Work


class _Indexer(BaseIndexer):  # type: ignore[misc]
    """Lists the server, which the one that comes with it has no way to be told of."""

    def __init__(self, url: str) -> None:
        self._url = url

    def discover_files(self, input_dir: str, storage_options: Any) -> list[FileMetadata]:
        """Return the objects below a uri."""
        del storage_options
        filesystem = gcsfs.GCSFileSystem(token="anon", endpoint_url=self._url)  # noqa: S106
        found = filesystem.find(input_dir.removeprefix("gs://"), detail=True)
        return [
            FileMetadata(path=f"gs://{path}", size=about["size"]) for path, about in found.items()
        ]

    def build_or_load_index(self, input_dir: str, *_: Any, **__: Any) -> list[FileMetadata]:
        """List, and keep nothing."""
        return self.discover_files(input_dir, None)


_directories: list[str] = []
"""What it made for its index, which it keeps nothing in."""


def _dataset(work: Work) -> StreamingRawDataset:
    os.environ["STORAGE_EMULATOR_HOST"] = work.url
    # Of obstore, which reads them when it opens a store.
    os.environ["GOOGLE_BASE_URL"] = work.url
    os.environ["GOOGLE_ALLOW_HTTP"] = "true"
    os.environ["GOOGLE_SKIP_SIGNATURE"] = "true"
    _directories.append(tempfile.mkdtemp(prefix="aioflux-perf-litdata-"))
    return StreamingRawDataset(
        f"gs://{work.bucket}/{work.prefix}",
        cache_dir=_directories[-1],
        indexer=_Indexer(work.url),
        transform=decode(work),
    )


_DATASETS = Datasets(_dataset)
prepare = _DATASETS.prepare


async def load(work: Work) -> tuple[int, float]:
    """Take its dataset through an epoch."""
    try:
        return _DATASETS.epoch(work)
    finally:
        while _directories:
            shutil.rmtree(_directories.pop())


stream = load
"""It has one dataset, for both."""
