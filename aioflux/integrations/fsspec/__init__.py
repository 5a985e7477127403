"""aioflux as filesystems of fsspec.

fsspec.open("aioflux+gs://bucket/key")                  # an installed aioflux is known to fsspec

from aioflux.integrations.fsspec import register
register(replace=("gs", "s3"))                          # now gs:// is aioflux's, for all of
pandas.read_parquet("gs://bucket/table.parquet")        # fsspec's users in this process
"""

from __future__ import annotations

from aioflux.integrations.fsspec._system import (
    AiofluxFileSystem,
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
