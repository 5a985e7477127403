"""The API of torchdata's S3 IO DataPipes, for `s3://` and the other schemes of aioflux.

    from torch.utils.data import DataLoader
    from aioflux.compat.s3_datapipes import IterableWrapper

    urls = IterableWrapper(["s3://bucket/prefix/"]).list_files_by_s3()
    shards = urls.shuffle().sharding_filter().load_files_by_s3()
    for batch in DataLoader(shards.readlines(return_path=False), batch_size=512, num_workers=4): ...

A program changes only the import. The pipes also accept `gs://`, `az://`, `file://` and `memory://`
urls. Each worker prefetches objects within a limit in bytes. Listed objects are read in the listed
generation, and verified. If an object cannot be read, an error names the object.

`IterableWrapper` and `StreamWrapper` are classes of torch. `readlines` has the name and parameters
of torchdata's pipe, which torch does not contain. `save_files_by_s3` writes objects; torchdata had
no pipe for this.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401  all modules below import torch
except ModuleNotFoundError as exc:
    from aioflux._values.distribution import pip_install

    raise ModuleNotFoundError(
        f"aioflux.compat.s3_datapipes needs PyTorch: {pip_install('torch')}", name=exc.name
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
