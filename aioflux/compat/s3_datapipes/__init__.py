"""The S3 IO DataPipes of torchdata, over aioflux: the same names on `s3://`, and on every store.

    from torch.utils.data import DataLoader
    from aioflux.compat.s3_datapipes import IterableWrapper

    urls = IterableWrapper(["s3://bucket/prefix/"]).list_files_by_s3()
    shards = urls.shuffle().sharding_filter().load_files_by_s3()
    for batch in DataLoader(shards.readlines(return_path=False), batch_size=512, num_workers=4): ...

Only the import changes. `gs://`, `az://`, `file://` and `memory://` urls work alike. Objects are
prefetched in every worker, bounded in bytes; they are those that were listed, whole and verified; a
failed object is an error that names it, and never missing from a batch without one.

`IterableWrapper` and `StreamWrapper` are torch's own. `readlines`, which torch does not ship, is
torchdata's by name and parameters. `save_files_by_s3` writes, which torchdata's pipes did not.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401  every name below is torch's, too
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "aioflux.compat.s3_datapipes needs PyTorch: pip install 'aioflux[torch]'", name=exc.name
    ) from exc

from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.utils.common import StreamWrapper

from aioflux.compat.s3_datapipes._lines import LineReader
from aioflux.compat.s3_datapipes._lister import ListedUrl, S3FileLister
from aioflux.compat.s3_datapipes._loader import S3FileLoader
from aioflux.compat.s3_datapipes._saver import S3FileSaver

__all__ = [
    "IterableWrapper",
    "LineReader",
    "ListedUrl",
    "S3FileLister",
    "S3FileLoader",
    "S3FileSaver",
    "StreamWrapper",
]
