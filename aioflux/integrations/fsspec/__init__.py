"""fsspec filesystems over aioflux.

fsspec.open("aiogs://bucket/key")                       # works as soon as aioflux is installed

from aioflux.integrations.fsspec import register
register(replace=("gs", "s3"))                          # aioflux now serves gs:// and s3:// for
pandas.read_parquet("gs://bucket/table.parquet")        # all users of fsspec in this process

The protocols are `aiogs`, `aios3`, `aioaz`, `aiofile` and `aiomemory`; docs/fsspec.md shows them
with pandas, pyarrow, dask, xarray, zarr and datasets.

The package needs fsspec: `pip install 'aioflux-storage[fsspec]'`.
"""

from __future__ import annotations

try:
    import fsspec as _fsspec  # type: ignore[import-untyped]  # noqa: F401
except ModuleNotFoundError as exc:
    if exc.name != "fsspec":
        raise
    from aioflux._values.distribution import pip_install

    raise ModuleNotFoundError(
        f"aioflux.integrations.fsspec needs fsspec: {pip_install('fsspec')}", name=exc.name
    ) from exc

from aioflux.integrations.fsspec._filesystem import AiofluxFileSystem
from aioflux.integrations.fsspec._protocols import (
    AzureFileSystem,
    GSFileSystem,
    LocalFileSystem,
    MemoryFileSystem,
    S3FileSystem,
    register,
)

__all__ = [
    "AiofluxFileSystem",
    "AzureFileSystem",
    "GSFileSystem",
    "LocalFileSystem",
    "MemoryFileSystem",
    "S3FileSystem",
    "register",
]
