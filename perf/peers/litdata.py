"""litData's StreamingRawDataset in DataLoader workers, with defaults.

litData reads through obstore and has no option for the server's address, so the environment sets
it. Like litData's own indexer, `_Indexer` lists with gcsfs; it does not store the index, because
the other peers list each time, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from perf.peers._gcsfs import open_filesystem
from perf.peers._loading import Datasets, decode

try:
    from litdata import StreamingRawDataset  # type: ignore[import-not-found]
    from litdata.raw.indexer import BaseIndexer, FileMetadata  # type: ignore[import-not-found]
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        f"{exc.name} is missing (pip install -e '.[perf-loading]')", name=exc.name
    ) from exc

if TYPE_CHECKING:
    from perf.work import Moved, Work


class _Indexer(BaseIndexer):  # type: ignore[misc]
    """An indexer with the address of the server, which litData's own indexer cannot set."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def discover_files(self, input_dir: str, storage_options: Any) -> list[FileMetadata]:
        """Return the objects below a uri."""
        del storage_options
        filesystem = open_filesystem(self._work)
        found = filesystem.find(input_dir.removeprefix("gs://"), detail=True)
        return [
            FileMetadata(path=f"gs://{path}", size=about["size"]) for path, about in found.items()
        ]

    def build_or_load_index(self, input_dir: str, *_: Any, **__: Any) -> list[FileMetadata]:
        """List without an index file."""
        return self.discover_files(input_dir, None)


_directories: list[str] = []
"""Cache directories of the datasets; they stay empty."""


def _dataset(work: Work) -> StreamingRawDataset:
    os.environ["STORAGE_EMULATOR_HOST"] = work.url
    # obstore reads these variables when it opens a store.
    os.environ["GOOGLE_BASE_URL"] = work.url
    os.environ["GOOGLE_ALLOW_HTTP"] = "true"
    os.environ["GOOGLE_SKIP_SIGNATURE"] = "true"
    _directories.append(tempfile.mkdtemp(prefix="aioflux-perf-litdata-"))
    return StreamingRawDataset(
        f"gs://{work.bucket}/{work.prefix}",
        cache_dir=_directories[-1],
        indexer=_Indexer(work),
        transform=decode(work),
    )


_DATASETS = Datasets(_dataset)
prepare = _DATASETS.prepare


async def load(work: Work) -> Moved:
    try:
        return await _DATASETS.epoch(work)
    finally:
        while _directories:
            shutil.rmtree(_directories.pop())
