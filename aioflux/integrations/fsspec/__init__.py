"""aioflux as filesystems of fsspec.

fsspec.open("aiogs://bucket/key")                       # fsspec finds an installed aioflux

from aioflux.integrations.fsspec import register
register(replace=("gs", "s3"))                          # from now on aioflux serves gs:// for
pandas.read_parquet("gs://bucket/table.parquet")        # all users of fsspec in this process

The protocols are `aiogs`, `aios3`, `aioaz`, `aiofile` and `aiomemory`; docs/fsspec.md shows them
in pandas, pyarrow, dask, xarray, zarr and datasets. `aioflux+gs` and the others with a `+` mean the
same, but some libraries take them for local paths.

It needs fsspec: `pip install "aioflux[fsspec]"`.
"""

from __future__ import annotations

try:
    import fsspec as _fsspec  # type: ignore[import-untyped]  # noqa: F401
except ModuleNotFoundError as exc:
    if exc.name != "fsspec":
        raise
    raise ModuleNotFoundError(
        "aioflux.integrations.fsspec needs fsspec: pip install 'aioflux[fsspec]'", name=exc.name
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
